"""Examples and the notebook server, run as users run them, and ``benchmarks/main_job.py`` in its smallest size."""

import json
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import ranks
from paths import ROOT
from waiting import scaled

EXAMPLES = ROOT / "examples"
COLUMNS = ["process", "managed", "unmanaged", "recent", "spilled", "device", "host", "disk"]
README = (EXAMPLES / "README.md").read_text()
SERVER = ROOT / "jobscripts" / "notebook_server.py"


def run(gpus: str, name: str, *arguments: str) -> str:
    """Run an example by ``hpcgpu run``, or by Python alone; return its output."""
    program = [str(ranks.BIN / "hpcgpu"), "run", "--gpus", gpus] if gpus else [sys.executable]
    done = ranks.run_command([*program, str(EXAMPLES / name), *arguments], timeout=scaled(150))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_schedulers_agree() -> None:
    printed = run("", "schedulers.py", "--size", "1000000", "--chunk", "100000", "--workers", "2")
    head, *lines, last = printed.splitlines()
    assert "mean of 1,000,000 random numbers in 10 chunks" in head
    found = [re.fullmatch(r"(.+?) +\d+\.\d{3} s   (0\.\d{15})", line) for line in lines]
    assert [m and m[1] for m in found] == ["serial", "threads, 2", "processes, 2", "distributed, 2", "hpcgpu, 2 GPUs"]
    assert all(abs(float(m[2]) - 0.5) < 0.005 for m in found if m)  # 0.005: 17 standard deviations
    assert last == "all means agree"


def test_checkpoint_goes_on_in_the_second_run(tmp_path: Path) -> None:
    for before in (0, 16):
        printed = run("sim:2", "resume.py", "--chunks", "16", "--folder", str(tmp_path / "run"))
        assert f"{before} of 16 chunks are there" in printed
        assert "the sum is right" in printed


def test_memory_types_show_what_happens() -> None:
    printed = run("sim:2x40MiB", "memory_types.py", "--size", "128", "--leak", "64")
    assert "the arrays are right" in printed
    head, *lines = printed.splitlines()
    assert head.split() == COLUMNS
    found = [re.fullmatch(r"(.+?)((?: +\d+){8})", line) for line in lines]
    rows = {m[1]: dict(zip(COLUMNS, map(int, m[2].split()), strict=True)) for m in found if m}
    idle, made, read = rows["idle"], rows["4 of 4 parts made"], rows["all of them read"]
    assert [idle[c] for c in ("managed", "spilled", "device", "host", "disk")] == [0, 0, 0, 0, 0]
    assert made["device"] + made["host"] + made["disk"] == made["device"] + made["spilled"] == 128
    assert max(made["device"], read["device"]) <= 64, printed
    # a part that both workers have summed is twice here until Dask drops one, perhaps after the heartbeat's "spilled"
    assert read["device"] + read["host"] + read["disk"] >= 128 and read["spilled"] >= read["host"] + read["disk"]
    released, leaked, freed, trimmed = (
        rows[name] for name in ("arrays released", "something leaked", "leak freed", "trim_memory")
    )
    assert released["spilled"] == released["device"] == released["host"] == released["managed"] == 0
    # two workers with 64 MiB each, less what the workers need for themselves or give back meanwhile
    assert min(leaked["process"] - released["process"], leaked["recent"], leaked["process"] - freed["process"]) > 100
    assert rows["  5 s later"]["unmanaged"] - leaked["unmanaged"] > 100
    assert freed["process"] - trimmed["process"] > 30  # what the arrays took in host memory


def test_every_example_is_described_and_prints_its_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in EXAMPLES.glob("*.py"):
        assert f"[{path.name}]({path.name})" in README
        monkeypatch.setattr(sys, "argv", [str(path), "--help"])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(path), run_name="__main__")
        assert (end.value.code, "--cupy" in capsys.readouterr().out) == (0, True)


@pytest.mark.parametrize("path", sorted((EXAMPLES / "libraries").glob("*.py")), ids=lambda path: path.stem)
def test_library_example_is_short_and_begins_with_its_command(path: Path) -> None:
    """``make libraries`` runs it: the libraries are not installed here."""
    first, *rest = path.read_text().splitlines()
    assert first == f"# hpcgpu run --gpus sim:2 examples/libraries/{path.name}"
    assert 20 <= len(rest) <= 65
    assert [line for line in rest if "Client(" in line and "def " not in line] == [
        "    with Client() as client:  # the cluster's line: the run's cluster, or distributed's LocalCluster"
    ]
    assert not [line for line in rest if "hpcgpu" in line]
    assert f"[{path.name}](libraries/{path.name})" in README


def test_clusters_are_measured_and_compared() -> None:
    """One run of the smallest size."""
    argv = [sys.executable, str(ROOT / "benchmarks/main_job.py"), "--size", "smallest", "--runs", "1", "--json"]
    done = ranks.run_command([*argv, "--protocols", "tls", "--only", "hot and cold"], timeout=scaled(170))
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert all(line.keys() >= {"bench", "case", "who", "measure", "value", "unit", "runs"} for line in lines)
    figures = {(line["case"], line["who"], line["measure"]): line["value"] for line in lines}
    for who in ("hpcgpu", "hpcgpu, host arrays", "LocalCluster"):
        assert figures["hot and cold, tls", who, "cpu_s"] > 0
        # the blocks alone, which the tiers in memory cannot hold
        assert figures["hot and cold, tls", who, "host_to_disk_mib"] > 0
    assert figures["hot and cold, tls", "hpcgpu", "device_to_host_mib"] > 0
    assert {line["case"] for line in lines if "goal" in line} == {"hot and cold, tls"}


def test_address_of_a_notebook_server_is_its_owners(tmp_path: Path) -> None:
    """A batch system ends it; ``lab/test_in_a_job.py`` has one with a notebook, which is shut down."""
    argv = ranks.command(SERVER, "--allow-root", options=("--gpus", "sim:1"))
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as server:
        said = ""
        while "is running at" not in said:
            said += server.stderr.readline() or pytest.fail(f"it has ended: {said}")
        address = Path(re.search(r"its address: cat (\S+)", said)[1])
        assert address.stat().st_mode & 0o777 == 0o600
        token = address.read_text().strip().partition("?token=")[2]
        server.send_signal(signal.SIGTERM)
        _, rest = server.communicate(timeout=scaled(60))
    assert server.returncode == 143, rest
    assert len(token) > 20
    assert token not in said + rest
    assert not address.exists()


def test_a_python_without_jupyter_says_what_to_install() -> None:
    code = f"import sys, runpy; sys.path = [p for p in sys.path if 'site-packages' not in p] + [{str(ROOT)!r}]; "
    code += f"sys.argv[1:] = []; runpy.run_path({str(SERVER)!r}, run_name='__main__')"
    done = ranks.run_command([sys.executable, "-c", code])
    assert done.returncode == 2, done.stderr
    assert "pip install jupyterlab" in done.stderr
