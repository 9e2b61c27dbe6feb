"""Options and fixtures of all tests."""

import compileall
import contextlib
import gc
import inspect
import logging
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import dask
import hypothesis
import leaks
import pytest
import ranks
from paths import PACKAGE, SUPPORT, TESTS
from pbs_replay import Pbs
from programs import MPICH, install
from waiting import SLOWNESS, STEADY, Said, run, scaled

from hpcgpu.deploy.network.data_connections import loops
from hpcgpu.model import Patience

# Rooms whose tests start threads and processes; the others are pure.
STARTS = {"agent", "checkpoint", "cli", "deploy", "host", "launch", "sim", "spill", "supervise", "support"}
MARKERS = {
    "process": "mpi",
    "lab": "slurm",
    "pbs": "pbs",
    "gpu": "gpu",
    "ucx": "ucx",
    "cupy": "cupy",
    "libraries": "libraries",
}
IMPATIENT = Patience(
    submission_s=2.0, retries_s=(0.25, 0.5, 1.0, 1.0), ask_s=1.0, news_s=0.5, refused_s=1.0, unlisted_s=1.0
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite golden files, then read the diff")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.import_plugin("outcomes")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # of an image: each process would compile what it imports
    os.environ.pop("PYTHONUNBUFFERED", None)  # of an image: it hides what a process that is ended loses
    sys.dont_write_bytecode = False
    os.environ.update(STEADY)
    dask.config.refresh()
    # Nothing is failed by the time it took: the machine may be busy.
    slow = [hypothesis.HealthCheck.too_slow]
    # As in Hypothesis's own profile for CI: a commit is judged by what it changes. Runs of people find new examples.
    settled = bool(os.environ.get("CI"))
    hypothesis.settings.register_profile("busy", deadline=None, derandomize=settled, suppress_health_check=slow)
    hypothesis.settings.load_profile("busy")
    if config.getoption("--update-golden"):
        os.environ["UPDATE_GOLDEN"] = "1"
    if not hasattr(config, "workerinput"):
        # For all processes of ours that tests start, also in the lab's containers: they see this checkout read-only.
        compileall.compile_dir(PACKAGE, quiet=1)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give each test the time that it needs on this machine."""
    for item in items if SLOWNESS > 1 else ():
        mark = item.get_closest_marker("timeout")
        seconds = mark.args[0] if mark and mark.args else float(config.getini("timeout"))
        item.add_marker(pytest.mark.timeout(scaled(seconds)), append=False)


def pytest_report_header() -> str:
    return f"limits of waits: {SLOWNESS:g} times (HPCGPU_SLOWNESS)"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage meanwhile, and leave what was made out of each later time: 4,600 tests make it cost 0.1 s."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark a test by its folder alone."""
    if marker := MARKERS.get(item.path.relative_to(TESTS).parts[0]):
        item.add_marker(marker)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an ``async def`` test on an event loop of its own, within a limit."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    run(lambda: pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture(autouse=True)
def _leaves_nothing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail a test that leaves something behind, and say what it is: first to come, last to go."""
    folder, *rooms = request.path.relative_to(TESTS).parts
    with contextlib.ExitStack() as stack:
        if folder in ("process", "ucx"):
            home = request.getfixturevalue("tmp_path")
            monkeypatch.setenv("HOME", str(home))
            stack.enter_context(leaks.no_process_left(home))
        if folder == "process" or (folder == "unit" and rooms[0] in STARTS):
            loops()  # they live as long as this process
            stack.enter_context(leaks.nothing_left())
        yield


@pytest.fixture(scope="session")
def mpich(tmp_path_factory: pytest.TempPathFactory) -> str:
    """MPICH beside Open MPI: both have an mpirun, so not in the same environment."""
    return str(install(MPICH, tmp_path_factory.mktemp("mpich")) / "bin" / "mpiexec")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """What is logged; distributed's loggers hand nothing on when they have been set up."""
    monkeypatch.setattr(logging.getLogger("distributed"), "propagate", True)
    caplog.set_level(logging.INFO, "distributed.hpcgpu")
    return caplog


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    return Said(capsys)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch system is a test's own: it may be asked each second, and is given up and tried again soon."""
    from hpcgpu.deploy.cluster.cluster import GPUCluster  # distributed: a second that few tests need

    monkeypatch.setattr(GPUCluster, "patience", IMPATIENT)


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test sends to workers is imported there, with what its module imports."""
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))


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
    for mom in server.moms:
        mom.wait(timeout=30)
    assert not left, "jobs were left behind"
    deleted = [w[2:] if w[:2] == ["-W", "force"] else w for w in server.calls("qdel")]
    assert all(len(words) == 1 for words in deleted), "a qdel of two ids ends the server"
