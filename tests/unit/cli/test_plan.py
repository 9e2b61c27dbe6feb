"""``hpcgpu plan``, from what is typed to what is printed; no batch system is asked."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from click.testing import CliRunner, Result
from paths import ROOT, TOPOLOGIES

from hpcgpu.cli.commands import hpcgpu
from hpcgpu.errors import ConfigError

POLARIS = ("--site", "polaris", "--gpus", "8", "--account", "x", "--walltime", "1h")
POLARIS = (*POLARIS, "--no-ask", "--job-extra-directives", "-l filesystems=home")
FORGE = ("--batch", "slurm", "--nodes", "2", "--gpus-per-node", "4", "--no-ask")


def invoke(*words: str) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(hpcgpu, ["plan", *words], catch_exceptions=False)


def stands(*words: str) -> str:
    """The place of the only line of the file with these words."""
    file = (ROOT / "site_configs/polaris.yaml").read_text().splitlines()
    [line] = [i for i, text in enumerate(file, 1) if all(word in text for word in words)]
    return f"site polaris, site_configs/polaris.yaml:{line}"


def test_a_known_site_is_enough() -> None:
    text = invoke(*POLARIS).output
    lines = [re.sub("   +", "  ", line.strip()) for line in text.splitlines()]
    for line in (
        f"nodes  2  option --gpus; 4 on a node: {stands('    gpus: 4')}",
        f"queue  debug  {stands('queue: debug')}",
        f"dialect.gpus  none  {stands('gpus: none')}",
        "9 ranks and 8 workers; rank 0 has the scheduler",
        f"disk: /local/scratch ({stands('path: /local/scratch')})",
        "#PBS -l select=2:system=polaris",
    ):
        assert line in lines
    assert "worker-3  0000:13:00.0 A100-SXM4-40GB  0     8: 0-7 " in text


def test_settings_are_printed_as_people_write_them() -> None:
    several = ("--env", "UCX_TLS=rc,cuda", "--env", "A=1", "--resources", "GPU=1", "--nics", "mlx5_0,mlx5_1")
    directives = ("--job-extra-directives", "--constraint=gpu", "--job-extra-directives", "-C x")
    sizes = ("--memory", "64GiB", "--walltime", "90m", "--drain", "30", "--device-memory-limit", "0.5")
    words = (*several, *directives, *sizes, "--jit-unspill", "--cores", "2", "--cores-per-gpu", "2")
    lines = [" = ".join(re.split("   *", line.strip())[:2]) for line in invoke(*FORGE, *words).output.splitlines()]
    for line in (
        "env = UCX_TLS=rc,cuda A=1",
        "resources = GPU=1",
        "nics = mlx5_0 mlx5_1",
        "job_extra_directives = --constraint=gpu '-C x'",
        "memory = 64.0 GiB",
        "walltime = 01:30:00",
        "drain = 30 s",
        "device_memory_limit = 0.5",
        "jit_unspill = true",
        "cores = 2",
    ):
        assert line in lines
    settings = lines[lines.index("settings:") : lines.index("request:")]
    assert not [line for line in settings if any(word in line for word in ("mappingproxy", "{", "True", "('"))]


def test_a_file_tells_what_a_node_is_like() -> None:
    (machine,) = TOPOLOGIES.glob("epyc-corona.xml")
    assert "as " + str(machine) + " describes it" in invoke(*FORGE, "--gpus", "sim:4", "--from", str(machine)).output
    text = invoke(*FORGE).output
    assert "the nodes are unknown: give --from FILE" in text
    assert "warning: 4 cores for 4 GPUs of each node" in text


def test_two_plans_are_compared_but_no_other_file(tmp_path: Path) -> None:
    before = tmp_path / "before.json"
    before.write_text(invoke(*FORGE, "--json").output)
    assert json.loads(before.read_text())["layout"] == [
        {"ranks": [0, 1, 2, 3, 4], "workers": 4},
        {"ranks": [5, 6, 7, 8], "workers": 4},
    ]
    same = CliRunner().invoke(hpcgpu, ["plan", *FORGE, "--diff", str(before)], standalone_mode=False)
    assert (same.return_value, same.output) == (0, "")
    other = CliRunner().invoke(
        hpcgpu, ["plan", *FORGE, "--walltime", "2h", "--diff", str(before)], standalone_mode=False
    )
    assert other.return_value == 1
    assert "request.time limit: not requested (default) -> 02:00:00 (option --walltime)" in other.output
    assert "script: +#SBATCH --time=02:00:00" in other.output
    for text in ("{", "[]", None):
        before.write_text(text) if text else before.unlink()
        done = CliRunner().invoke(hpcgpu, ["plan", *FORGE, "--diff", str(before)], standalone_mode=False)
        assert isinstance(done.exception, ConfigError)
        assert f"write one: hpcgpu plan --json > {before}" in str(done.exception)


def test_each_setting_says_where_it_was_set(tmp_path: Path) -> None:
    """In a process of its own, since Dask reads its files when it is imported."""
    file = tmp_path / "mine.yaml"
    file.write_text("hpcgpu: {queue: gpu, walltime: 1h, account: theirs}\n")
    (tmp_path / "before.yaml").write_text("hpcgpu: {queue: other, site: none}\n")
    more = {"DASK_CONFIG": str(tmp_path), "DASK_HPCGPU__WALLTIME": "2h", "HPCGPU_ACCOUNT": "me", "HOME": str(tmp_path)}
    more["COLUMNS"] = "300"
    argv = [sys.executable, "-m", "hpcgpu", "plan", *FORGE]
    text = subprocess.run(argv, capture_output=True, text=True, check=True, env={**os.environ, **more}).stdout
    for line in (
        "nodes  2  option --nodes",
        "account  me  HPCGPU_ACCOUNT",
        f"queue  gpu  dask config hpcgpu.queue, {file}",
        "walltime  02:00:00  dask config hpcgpu.walltime, DASK_HPCGPU__WALLTIME",
        f"site  none  dask config hpcgpu.site, {tmp_path / 'before.yaml'}",
    ):
        assert line in [re.sub("   +", "  ", row.strip()) for row in text.splitlines()]
