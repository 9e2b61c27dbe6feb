"""The folders of tests, leaks, outcomes of a session, and maintainers' scripts."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import leaks
import pytest
from paths import PACKAGE, ROOT, SUPPORT, TESTS
from waiting import scaled

KINDS = {"unit", "process", "lab", "pbs", "gpu", "ucx", "cupy", "libraries"}
ROOMS = {path.stem for path in PACKAGE.iterdir()} | {"support"}
SUITE = """
import pytest
from pathlib import Path
@pytest.mark.skip(reason="no Docker")
def test_lab(): pass
@pytest.mark.gpu
@pytest.mark.skip(reason="no GPU")
def test_gpu(): pass
def test_flaky():
    if not Path("ran").exists():
        Path("ran").touch()
        raise ValueError("the first run")
def test_bad(): raise ValueError("each run")
"""
# As in distributed's sources: it names its own module, certificates beside it, and wants a dict for its data.
OF_DISTRIBUTED = """
from pathlib import Path
import distributed.tests.test_data as here
from distributed.utils_test import gen_cluster, get_cert
def test_places(): assert Path(get_cert("tls.pem")).parent == Path(here.__file__).parent
@gen_cluster(nthreads=[("", 1)], worker_kwargs={"memory_limit": None})
async def test_no_zict(s, a): assert type(a.data) is dict
"""
# In place of the Python that makes the environment, of the one in it, and of uv.
PYTHON = """#!/bin/bash
case "$*" in
  "-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; printf '#!/bin/sh\\n' > "$3/bin/hpcgpu"
               chmod +x "$3/bin/hpcgpu" ;;
  *" uv")      printf '#!/bin/sh\\necho $UV_DEFAULT_INDEX $SSL_CERT_FILE uv $1 $2; exec [ $WORKS = uv ]' > "${0%/*}/uv"
               chmod +x "${0%/*}/uv" ;;
  *" list")    echo "global.index-url='https://mirror'"; echo ":env:.cert='/a b.pem'" ;;
  "-m pip "*)  echo 'Collecting numpy>=1.24 (from hpcgpu)'
               [ "$WORKS" = pip ] || { echo 'ERROR: No matching distribution' >&2; exit 1; }
               echo 'Collecting dask[array]~=2026.8; python_version > "3"'
               echo 'Installing collected packages: numpy, dask' ;;
esac
"""


def test_folders_mirror_the_package_and_give_the_markers() -> None:
    marker = re.compile(r"^[^\"'#]*pytest\.mark\.(mpi|slurm|pbs|gpu|ucx|libraries)\b", re.MULTILINE)
    for path in TESTS.rglob("test_*.py"):
        parts = path.relative_to(TESTS).parts
        assert parts[0] in KINDS, path
        assert set(parts[1:-1][:1]) <= ROOMS, path
        text = "" if path.samefile(__file__) else path.read_text()  # here markers are in a suite of its own
        assert not marker.search(text), f"{path}: leave the marker out, put the test into another folder"


def test_leaks_of_processes_and_files_are_named_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "LIMIT_S", 1.0)
    code = "import subprocess as s; print(s.Popen(['sleep', '600'], stdout=-3, stderr=-3, start_new_session=True).pid)"
    with pytest.raises(AssertionError, match=r"left behind: process \d+: sleep 600"), leaks.no_process_left(tmp_path):
        pid = int(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
    assert not leaks.command_line(pid)
    monkeypatch.setattr(leaks, "LIMIT_S", 0.1)
    with pytest.raises(AssertionError, match="left behind: forgotten"), leaks.no_process_left(tmp_path) as folder:
        (folder / "forgotten").touch()
    assert not folder.exists()


def test_decide_fails_for_skips_and_failures_that_come_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))
    monkeypatch.setenv("CI", "true")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # hypothesis and its like: most of a session's time
    (tmp_path / "pytest.ini").write_text(f"[pytest]\nmarkers = gpu: x\npythonpath = {SUPPORT}\n")
    (tmp_path / "conftest.py").write_text("pytest_plugins = ['outcomes']")
    script = (ROOT / "scripts/run_tests.py").read_text()
    for name, text in (("tests/test_it.py", SUITE), ("scripts/run_tests.py", script)):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)

    def call(*words: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "scripts/run_tests.py", *words]
        return subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=scaled(60), env=os.environ)

    ran = call("run", "it", "tests").stdout
    assert "requires these, which were skipped (no Docker):" in ran
    assert "  tests/test_it.py::test_gpu" not in ran
    done = call("decide", "it")
    assert done.returncode == 1
    lines = {"flaky: tests/test_it.py::test_flaky", "failed: tests/test_it.py::test_bad"}
    assert lines <= set(done.stdout.splitlines())
    assert "fault: it: required tests were skipped" in done.stdout
    report = (tmp_path / "build/test-report.json").read_text()
    monkeypatch.setenv("DEBIAN", "sid")
    assert "it: no report" in call("decide", "it").stdout
    assert (tmp_path / "build/test-report.json").read_text() == report
    assert "no report" in (tmp_path / "build/test-report-sid.json").read_text()


@pytest.mark.parametrize("target", ["test", "test-all", "labs"])
def test_dry_run_of_make_runs_no_test(target: str, tmp_path: Path) -> None:
    (tmp_path / "Makefile").write_bytes((ROOT / "Makefile").read_bytes())  # alone: whatever it runs fails
    argv = ["make", "-n", target]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=scaled(60))
    assert (done.returncode, done.stderr) == (0, "")
    assert "run_tests.py run lab" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["Makefile"]


def test_page_and_charts_show_the_figures_of_the_csv_files() -> None:
    argv = [sys.executable, str(ROOT / "scripts/bench_page.py"), "--check"]  # Matplotlib keeps its fonts open
    assert subprocess.run(argv, capture_output=True, text=True, timeout=scaled(60)).stderr == ""


@pytest.mark.parametrize(("script", "one"), [("channels.py", "wheel"), ("record_slurm.py", "submissions")])
def test_script_with_a_mistyped_name_lists_the_names(script: str, one: str) -> None:
    argv, env = [sys.executable, str(ROOT / "scripts" / script), "whele"], {**os.environ, "PYTHONPATH": str(SUPPORT)}
    done = subprocess.run(argv, capture_output=True, text=True, timeout=scaled(60), env=env)
    assert done.returncode
    assert re.search(rf"no such \w+: whele; there are {one}, ", done.stderr)


def test_run_reports_parts_that_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu

    # else a part is run without its library, and has failed
    assert {part.needs for part in gpu.PARTS} <= {"", *gpu.ASK}
    monkeypatch.setattr(gpu, "ASK", {"cupy": "import no_such_library"})
    parts = [
        gpu.Part("wrong", ("-c", "import sys; sys.exit('it went wrong')"), 20),
        gpu.Part("without", ("-c", "raise AssertionError"), 20, "cupy"),
        gpu.Part("right", ("-c", 'print(\'{"bench": "b", "value": 1.5}\')'), 20),
    ]
    assert gpu.run(tmp_path, parts, dict(os.environ), time.monotonic()) == 1
    report = json.loads((tmp_path / "gpu.json").read_text())
    outcomes = {part["name"]: (part["outcome"], part["exit_code"]) for part in report["parts"]}
    assert outcomes == {"wrong": ("failed", 1), "without": ("not done", None), "right": ("done", 0)}
    assert report["parts"][-1]["figures"] == [{"bench": "b", "value": 1.5}]
    for part in gpu.PARTS:
        assert [word for word in part.arguments if "/" in word and not (ROOT / word).exists()] == []


def test_parts_run_in_the_order_of_only(monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu

    ran: list[str] = []
    monkeypatch.setattr(gpu, "run", lambda out, parts, *_: ran.extend(part.name for part in parts) or 0)
    monkeypatch.setattr(gpu, "environment", lambda *_: {})
    assert gpu.main(["run", "--only", "first hour: lock", "first hour: order"]) == 0
    assert ran == ["first hour: lock", "first hour: order"]
    ran.clear()
    assert gpu.main([]) == 0
    assert ran[:3] == ["tests/gpu/spill/test_spill_gpu.py", "first hour: order", "memcheck"]
    assert sorted(ran) == sorted({part.name for part in gpu.PARTS})
    assert {name for name in ran if name.startswith("tests/")} >= {"tests/gpu/spill/test_cuda_standin.py"}


def test_dask_cuda_is_fetched_without_what_it_requires(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu_wheels

    calls: list[list[str]] = []

    def run(argv: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        calls.append(argv)
        return subprocess.CompletedProcess(argv, 0)

    monkeypatch.setattr(gpu_wheels.subprocess, "run", run)
    assert gpu_wheels.fetch(tmp_path / "wheels", "3.12", ["dask-cuda", "rmm-cu13"]) == 0
    pinned, alone = calls
    assert ("--no-deps" in pinned, "--no-deps" in alone) == (False, True)
    assert ("rmm-cu13" in pinned, "dask-cuda" in pinned, "-c" in pinned) == (True, False, True)
    assert (alone[-1], "-c" in alone) == ("dask-cuda", False)  # the pins would lead to an old version


def test_an_installation_shows_that_it_goes_on_and_how_to_use_it(tmp_path: Path) -> None:
    python, venv = tmp_path / "python", tmp_path / "venv"
    python.write_text(PYTHON)
    python.chmod(0o755)
    argv = ["make", "--no-print-directory", "demo", f"VENV={venv}", f"PYTHON={python}"]

    def make(works: str) -> subprocess.CompletedProcess[str]:
        (venv / ".installed").unlink(missing_ok=True)
        env = {**os.environ, "WORKS": works, "MAKEFLAGS": ""}
        return subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, env=env, timeout=scaled(60))

    failed = make("neither")
    assert (failed.returncode, (venv / ".installed").exists()) == (2, False)
    assert "pip could not install the packages (its words are above)" in failed.stderr
    for works, words in (("pip", " numpy dask\n"), ("uv", "https://mirror /a b.pem uv pip install\n")):
        done = make(works)
        assert (done.returncode, words in done.stdout) == (0, True), done
        assert ("numpy" in done.stdout) == (works == "pip")
        assert done.stdout.endswith(f"On your own: . {venv}/bin/activate; hpcgpu run --gpus sim:4 examples/svd.py\n")


def test_tests_of_distributed_have_their_sources_and_a_part(tmp_path: Path) -> None:
    folder = tmp_path / "distributed/tests"
    folder.mkdir(parents=True)
    for path, text in (("../scheduler.py", ""), ("tls.pem", ""), ("test_data.py", OF_DISTRIBUTED)):
        (folder / path).write_text(text)
    argv = [ROOT / "scripts/distributed_tests.sh", "whole", folder]
    env = {**os.environ, "PYTHON": sys.executable, "WORKERS": "0"}
    done = subprocess.run(argv, capture_output=True, text=True, env=env, timeout=scaled(120))
    assert re.sub(" in .*", "", done.stdout).splitlines() == [
        "none: 2 passed",
        "whole: 1 failed, 1 passed",
        "test_data.py::test_no_zict",
    ], done.stdout + done.stderr
