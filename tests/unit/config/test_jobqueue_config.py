"""Dask's configuration for dask-jobqueue, read by the classes that submit jobs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import dask_jobqueue
import pytest
import ranks
import yaml
from hypothesis import given
from hypothesis import strategies as st
from waiting import scaled

from hpcgpu.config.layers import read_settings
from hpcgpu.config.migration import ignored, translate, without
from hpcgpu.errors import ConfigError
from hpcgpu.model import Settings, Site
from hpcgpu.model.site import NodeType

INSTALLED = yaml.safe_load(Path(dask_jobqueue.__file__).with_name("jobqueue.yaml").read_text())["jobqueue"]
SECTION = {
    **{"name": "me", "cores": 32, "memory": "64GB", "processes": 4, "queue": "gpu", "account": "p1"},
    **{"walltime": "02:00:00", "interface": "ib0", "job-extra-directives": ["--constraint=a100"]},
    **{"job_directives_skip": ["--mem", "mem="], "job-script-prologue": ["module load cuda"], "log-directory": "logs"},
    **{"local-directory": "/scratch", "death-timeout": 300, "python": "/opt/python"},
    **{"scheduler-options": {"dashboard_address": ":0"}, "shebang": "#!/usr/bin/env bash"},
    "worker-command": "distributed.cli.dask_worker",
}


def read(section: dict[str, Any], given: dict[str, object] | None = None, **more: Any) -> Settings:
    return read_settings(given or {}, jobqueue=("jobqueue.slurm", section), **more)


@pytest.mark.parametrize("system", ["slurm", "pbs"])
def test_what_dask_jobqueue_installs_says_nothing(system: str) -> None:
    section = without(INSTALLED[system], INSTALLED[system])
    assert section == {}
    assert read(section) == Settings()
    assert ignored(INSTALLED[system]) == ()


def test_what_a_section_means_here() -> None:
    found = read(SECTION, {"gpus_per_node": 4})
    assert (found.job_name, found.queue, found.account, found.walltime_s) == ("me", "gpu", "p1", 7200)
    assert (found.memory_bytes, found.cores_per_gpu, found.cores) == (64 * 10**9, 8, "all")
    assert (found.interface, found.python, found.death_timeout_s) == ("ib0", "/opt/python", 300.0)
    assert (found.log_directory, found.local_directory) == ("logs", "/scratch")
    assert found.job_extra_directives == ("--constraint=a100",)
    assert found.job_directives_skip == ("--mem",)
    assert found.job_script_prologue == ("module load cuda",)
    assert found.where("walltime") == "dask config jobqueue.slurm.walltime"
    assert found.where("cores_per_gpu") == "dask config jobqueue.slurm.cores"


def test_it_stands_below_hpcgpus_own_section_and_above_the_site() -> None:
    defaults = {"queue": "site", "interface": "eth0", "cores_per_gpu": 3, "job_extra_directives": ["--exclusive"]}
    site = Site(name="here", batch="slurm", nodes={"gpu": NodeType(gpus=2)}, defaults=defaults)
    own = {"queue": "own"}
    found = read({"queue": "theirs", "interface": "ib0", "cores": 16}, dask_config=own, site=site)
    assert (found.queue, found.interface, found.cores_per_gpu) == ("own", "ib0", 8)
    assert read({"queue": "theirs"}, environ={"HPCGPU_QUEUE": "mine"}).queue == "mine"
    # what the site's jobs cannot do without stays
    assert read(SECTION, site=site).job_extra_directives == ("--exclusive", "--constraint=a100")


def test_jobqueue_cores_are_divided_and_errors_have_a_place() -> None:
    assert read({"cores": 30}, {"gpus": "sim:4"}).cores_per_gpu == 7
    assert read({"cores": 2}, {"gpus_per_node": 4}).cores_per_gpu == 1
    assert read({"cores": 30, "job-cpu": 8}, {"gpus_per_node": 4}).cores_per_gpu == 2
    assert read({"cores": 30}, {"gpus_per_node": 4, "cores_per_gpu": 1}).cores_per_gpu == 1
    assert read({"cores": 30}).cores_per_gpu is None  # nobody has said over how many
    with pytest.raises(ConfigError, match="cores of a job"):
        read({"cores": "many"}, {"gpus_per_node": 4})
    with pytest.raises(ConfigError, match=r"set by dask config jobqueue\.slurm\.walltime"):
        read({"walltime": "soon"})
    with pytest.raises(ConfigError, match=r"dask config jobqueue\.slurm is 'x'"):
        read_settings({}, jobqueue=("jobqueue.slurm", "x"))  # type: ignore[arg-type]


def test_older_names_count_where_the_newer_say_nothing() -> None:
    old = {"project": "p", "job-extra": ["-C x"], "env-extra": ["a"], "header-skip": ["-n"]}
    found = read({**old, "account": None, "job-extra-directives": []})
    assert (found.account, found.job_extra_directives) == ("p", ("-C x",))
    assert (found.job_script_prologue, found.job_directives_skip) == (("a",), ("-n",))
    assert read({**old, "account": "new"}).account == "new"


def test_what_is_ignored_is_named_with_what_to_write() -> None:
    said = ignored(SECTION)
    assert [text.split()[0].rstrip(":") for text in said] == ["processes", "job-directives-skip", "scheduler-options"]
    assert "give gpus_per_node" in said[0]
    assert ignored({"python": "apptainer exec x python", "local-directory": "$TMPDIR", "nonsense": 1}) == (
        "python: 'apptainer exec x python' (here it is one program)",
        "nonsense (no option of hpcgpu)",
    )
    assert read({"python": "a b", "local-directory": "$TMPDIR"}) == Settings()
    assert read({"local-directory": "$SCRATCH/x"}).local_directory == "$SCRATCH/x"


@given(st.sampled_from(["slurm", "pbs"]), st.data())
def test_no_key_is_lost(system: str, data: st.DataObject) -> None:
    """Whatever a section has is taken, or named as ignored."""
    values = {"cores": 4, "job-cpu": 4, "walltime": "1h", "memory": "1GB", "death-timeout": 9, "name": "n"}
    keys = data.draw(st.sets(st.sampled_from(sorted(INSTALLED[system]))))
    section = {key: values.get(key, ["-x"] if "directives" in key or "skip" in key else "--some") for key in keys}
    _, taken = translate(section, 2)
    named = {text.split()[0].rstrip(":") for text in ignored(section)}
    replaced = {"cores"} if "job-cpu" in keys else set()
    for new, old in (("job-extra-directives", "job-extra"), ("job-directives-skip", "header-skip")):
        replaced |= {old} if new in keys else set()
    replaced |= {"env-extra"} if "job-script-prologue" in keys else set()
    assert keys - set(taken.values()) - named <= replaced


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / ".config" / "dask").mkdir(parents=True)
    text = "jobqueue: {slurm: {queue: theirs, processes: 4, walltime: '01:00:00'}, pbs: {queue: other}}"
    (tmp_path / ".config" / "dask" / "jobqueue.yaml").write_text(text)
    return tmp_path


def python(home: Path, code: str) -> subprocess.CompletedProcess[str]:
    argv, env = [sys.executable, "-c", code], ranks.environment(HOME=str(home))
    return subprocess.run(argv, capture_output=True, text=True, timeout=scaled(60), env=env)


def test_ranks_do_not_read_it_nor_import_dask_for_it(home: Path) -> None:
    code = "import sys; from hpcgpu.deploy.settings import read; print(read({}, '').settings.queue, "
    assert python(home, code + "'dask' in sys.modules)").stdout == "None False\n"


@pytest.mark.parametrize("first", ["", "import dask_jobqueue; "])
def test_submission_reads_its_section_and_logs_ignored_keys_once(home: Path, first: str) -> None:
    """Defaults that dask_jobqueue has added at its import are nobody's wish: no -t 00:30:00 of its."""
    code = first + "from hpcgpu.deploy.jobs.batch_client import read_job\nfor b in ('slurm', 'slurm', 'pbs'):\n"
    done = python(
        home,
        code + "    _, s, system = read_job({'gpus_per_node': 4}, 'keyword {name}', (), b); print(system.script(s))",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("--partition=theirs") == 2
    assert done.stdout.count("--time=01:00:00") == 2
    assert done.stdout.count("-q other") == 1
    assert "00:30:00" not in done.stdout
    assert done.stderr.count("hpcgpu: dask config jobqueue.slurm: ignored are processes") == 1
    code = "from hpcgpu import SLURMGPUCluster\nSLURMGPUCluster(nodes=0)"
    assert "jobqueue.slurm: ignored are processes" in python(home, code).stderr
