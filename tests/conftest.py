"""Options and fixtures of all tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import ranks
from lab import WITH_ACCOUNTING, Lab, LabUnavailable
from pbs_replay import Pbs
from waiting import Said

import hpcgpu.batch.pbs
import hpcgpu.deploy.jobs.ask
import hpcgpu.deploy.jobs.fleet
import hpcgpu.plan.asking

LAB_START_S = 900  # the first slurm test may build the image: 2-4 minutes were measured on 2 cores


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite golden files, then read the diff")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.import_plugin("required")
    if config.getoption("--update-golden"):
        os.environ["UPDATE_GOLDEN"] = "1"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    first = next((item for item in items if item.get_closest_marker("slurm")), None)
    if first:
        first.add_marker(pytest.mark.timeout(LAB_START_S))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Clear away what a killed mpirun left: a later one of the same pid cannot start beside it (Open MPI 5.0.11).

    It says that "the PMIx server's listener thread failed to start"; pids come again after 32,768.
    """
    if item.get_closest_marker("mpi"):
        for folder in Path(tempfile.gettempdir()).glob("ompi.*"):
            pid = folder.suffix[1:]
            if pid.isdigit() and not Path("/proc", pid).exists():
                shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def started(lab: Lab) -> Iterator[Lab]:
    """Start a lab once. One that was up already is used and left up, as with HPCGPU_KEEP_LAB=1."""
    keep = lab.is_up() or os.environ.get("HPCGPU_KEEP_LAB") == "1"
    try:
        lab.up()
    except LabUnavailable as why:
        pytest.skip(f"no Slurm lab here: {why}")
    yield lab
    if not keep:
        lab.down()


@pytest.fixture(scope="session")
def _lab() -> Iterator[Lab]:
    with started(Lab()) as lab:
        yield lab


@pytest.fixture(scope="session")
def mpich(tmp_path_factory: pytest.TempPathFactory) -> str:
    """MPICH beside Open MPI: both have an mpirun, so not in the same environment."""
    folder = tmp_path_factory.mktemp("mpich")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--prefix", str(folder), "mpich==5.0.2"]
    subprocess.run(pip, check=True, timeout=150)
    return str(folder / "bin/mpiexec")


@contextmanager
def idle(lab: Lab) -> Iterator[Lab]:
    """The lab, idle. Whatever a test leaves behind on it, jobs or processes, fails the test."""
    jobs = lab.jobs()
    assert not jobs, f"the Slurm lab is in use: {jobs}. End these jobs (scancel -u hpc) or 'make slurm-down'."
    before = lab.processes()
    yield lab
    left = lab.wait_idle(before)
    if left:
        lab.clean_up(before)
    assert not left, f"left behind on the lab: {left}"


@pytest.fixture
def slurm_lab(_lab: Lab) -> Iterator[Lab]:
    with idle(_lab) as lab:
        yield lab


@pytest.fixture
def accounting_lab() -> Iterator[Lab]:
    """Another lab, whose Slurm knows users and their limits (slurmdbd); up for one test only."""
    with started(Lab(WITH_ACCOUNTING, accounting=True)) as lab, idle(lab):
        yield lab


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    return Said(capsys)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch system is a test's own: it may be asked each second, and is given up and tried again soon."""
    submit = hpcgpu.batch.pbs.Pbs.submit
    monkeypatch.setattr(hpcgpu.batch.pbs.Pbs, "submit", lambda *given: replace(submit(*given), timeout_s=2.0))
    monkeypatch.setattr(hpcgpu.plan.asking, "_NEW_S", 1.0)
    monkeypatch.setattr(hpcgpu.deploy.jobs.ask, "_PAUSES_S", (0.25, 0.5, 1.0, 1.0))
    monkeypatch.setattr(hpcgpu.deploy.jobs.fleet, "_AGAIN_S", 1.0)


@pytest.fixture
def build() -> str:
    """Whose words PBS has; tests parametrize it."""
    return "release"


@pytest.fixture
def pbs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, build: str) -> Iterator[Pbs]:
    server = Pbs(tmp_path / "pbs", build)
    server.install(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{ranks.BIN}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    yield server
    left = [job_id for job_id in server.ids() if not server.over(job_id)]
    for job_id in left:
        server.end(job_id, 265, sig=9)
    assert not left, "jobs were left behind"
    assert all(len(words) == 1 for words in server.calls("qdel")), "a qdel of two ids ends the server"
