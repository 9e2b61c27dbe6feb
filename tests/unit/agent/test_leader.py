"""A leader, its fork server and rank 0's scheduler process: ends that do not come, and unexpected errors."""

import asyncio
import json
import operator
import os
import signal
import socket
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from programs import python
from waiting import failure, failures

from hpcgpu.agent.fork_server import ForkServer, ForkServerSpawner
from hpcgpu.agent.leader import Leader, LeaderContext
from hpcgpu.agent.member import Member
from hpcgpu.agent.rank0 import wait_started
from hpcgpu.errors import LaunchError
from hpcgpu.host import process
from hpcgpu.model import RunDocument, Settings, WorkerSpec

CODE = """
import asyncio, os, sys
from hpcgpu.agent.leader import ForcedEnd
from hpcgpu.agent.fork_server import ForkServer

async def refuse():
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            pass  # takes it for something else, as a connection may

async def lead():
    task = asyncio.create_task(refuse())
    await asyncio.sleep(0)
    forced.begin()
    if sys.argv[1:]:
        forced.begin(30.0)
        task.get_loop().call_later(1.5, os._exit, 7)

fork_server = ForkServer.fork()
print(fork_server.pid, flush=True)
with ForcedEnd(fork_server, 0.5) as forced:
    asyncio.run(lead())
"""
PRELOAD = """
import json, os, sys
from hpcgpu.agent.fork_server import prepare_forks

prepare_forks(simulated=True)
before = set(sys.modules)

def refuse(*_):
    raise AssertionError("a worker starts a program, or reads the versions of packages")

import importlib.metadata, subprocess
subprocess.Popen = importlib.metadata.version = importlib.metadata.distribution = refuse
from distributed.versions import get_versions

versions = get_versions()
from hpcgpu.sim import SimGpu
from hpcgpu.sim.registration import register_sizes
from dask.sizeof import sizeof
import numpy

register_sizes()
size = sizeof(SimGpu(1 << 20).asarray(numpy.zeros(1000, "u1")))
print(json.dumps({
    "new": sorted(set(sys.modules) - before),
    "arrays": "dask.array" in sys.modules,
    "threads": len(os.listdir("/proc/self/task")),
    "distributed": versions["packages"]["distributed"],
    "size": size,
}))
"""


def test_an_end_that_does_not_come_is_forced_and_said() -> None:
    done = python(CODE)
    assert done.returncode == os.EX_SOFTWARE, done.stderr
    assert "has not ended within 0.5 s; it is killed, and its workers" in done.stderr
    assert python(CODE, "more time").returncode == 7


def test_one_that_does_not_answer_is_killed_and_said() -> None:
    forked = ForkServer.fork()
    fork_server = ForkServer(forked.sock, forked.pid, answer_s=0.2)
    os.kill(fork_server.pid, signal.SIGSTOP)
    ours, theirs = socket.socketpair()
    with (
        ours,
        theirs,
        pytest.raises(LaunchError, match=f"the fork server, process {fork_server.pid}, did not answer within 0.2"),
    ):
        fork_server.spawn("builtins:print", None, (theirs.fileno(), 1, 2))
    assert os.waitstatus_to_exitcode(os.waitpid(fork_server.pid, 0)[1]) == -signal.SIGKILL
    fork_server.close()


def test_at_its_end_what_it_forked_is_gone() -> None:
    fork_server = ForkServer.fork()
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            pid = fork_server.spawn(
                "operator:call", operator.methodcaller("recv", 1), (theirs.fileno(), 1, 2)
            )  # it waits
        fork_server.close()
        assert not process.start_time(pid)
    assert os.waitpid(fork_server.pid, 0)[1] == 0


def test_a_fork_finds_what_it_needs_at_its_start() -> None:
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # as ranks have it
    facts = json.loads(python(PRELOAD, env=env, check=True).stdout)
    assert facts.pop("distributed")
    assert facts == {"new": [], "arrays": False, "threads": 1, "size": 1000}


def waited(code: int | None, *sent: dict[str, Any], ended: bool = True) -> dict[str, Any]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"".join(json.dumps(message).encode() + b"\n" for message in sent))
        if ended:
            theirs.close()
        return wait_started(ours, lambda: code, 60.0 if ended else 0.01)


@pytest.mark.parametrize(
    ("code", "ended", "why"),
    [
        (-9, True, "was killed by signal 9 before it listened"),
        (3, True, "exited with status 3 before it listened"),
        (None, True, "closed its connection before it listened"),
        (None, False, "does not listen after 0.01 s; the traceback above"),
    ],
)
def test_wait_started_reports_the_schedulers_end_or_silence(code: int | None, ended: bool, why: str) -> None:
    assert waited(None, {"op": "started", "port": 1}) == {"op": "started", "port": 1}
    with pytest.raises(LaunchError, match=f"the scheduler process {why}"):
        waited(code, ended=ended)


def test_its_error_is_said_with_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    text = "Traceback of 5,000 characters".ljust(5000, ".") + "\n"
    with pytest.raises(LaunchError, match="the scheduler could not be started: OSError: no room"):
        waited(1, {"op": "error", "text": text, "reason": "OSError: no room"})
    assert capsys.readouterr().err == text


def context() -> Any:
    run = RunDocument(settings=Settings(), shape="gang", folder="")
    return LeaderContext(run=run, environ={}, fork_server=None, scheduler={}, workers=())


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ours, theirs


async def test_fork_server_with_unreadable_reports_counts_as_dead(
    pair: tuple[socket.socket, socket.socket], log: pytest.LogCaptureFixture
) -> None:
    ours, theirs = pair
    died = asyncio.Event()
    spawner = ForkServerSpawner(ForkServer(ours, 0), died.set)
    child = spawner.adopt(1 << 30, theirs)
    theirs.send(b"garbage")
    await died.wait()
    assert child.exited.result() == -9
    assert failure(log).startswith("reading the fork server's reports failed: UnpicklingError")


def test_a_signal_ends_the_run_also_where_its_answer_raises(log: pytest.LogCaptureFixture) -> None:
    leader = Leader(context())
    leader.stop = Mock(side_effect=RuntimeError("no"))  # type: ignore[method-assign]
    leader._answer(signal.SIGTERM)()
    assert leader.exit_code == 128 + signal.SIGTERM
    assert leader.why.startswith("it got SIGTERM")
    assert failures(log) == ["the answer to SIGTERM failed: RuntimeError: no"]


@pytest.mark.parametrize(("launcher", "warnings"), [("OMPI_COMM_WORLD", 1), ("PMI", 0)])
def test_a_sigusr1_warns_but_for_those_of_mpich_and_never_kills(
    launcher: str, warnings: int, pair: tuple[socket.socket, socket.socket]
) -> None:
    environ = {f"{launcher}_RANK": "0", f"{launcher}_SIZE": "2"}
    leader = Leader(replace(context(), environ=environ, fork_server=ForkServer(pair[0], 0)))
    leader.drain = Mock()  # type: ignore[method-assign]
    leader.serve = AsyncMock(side_effect=lambda: os.kill(os.getpid(), signal.SIGUSR1) or 0)  # type: ignore[method-assign]
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # as in a rank
    try:
        assert asyncio.run(leader.run()) == 0
        assert signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL
        os.kill(os.getpid(), signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert leader.drain.call_count == warnings


async def test_a_member_that_cannot_hand_over_ends_with_the_reason(log: pytest.LogCaptureFixture) -> None:
    member = Member(context())
    member.watch = SimpleNamespace(peer_address="tls://x")
    member.nannies = [SimpleNamespace(close_gracefully=Mock(side_effect=RuntimeError("no")))]
    member.drain(None)
    await member.ended.wait()
    assert (member.exit_code, member.why[-16:]) == (os.EX_SOFTWARE, "RuntimeError: no")
    assert failures(log) == ["handing over the workers' data failed: RuntimeError: no"]


async def test_later_sigterms_change_nothing_and_leave_no_task(monkeypatch: pytest.MonkeyPatch) -> None:
    def asking() -> int:
        return sum("question for the time" in task.get_name() for task in asyncio.all_tasks())

    monkeypatch.setattr("hpcgpu.agent.member.CANCELLED_S", 0.0)
    member = Member(replace(context(), in_job=True))
    member.watch = Mock(peer_address="tls://x", write=AsyncMock(), close=AsyncMock())
    member._goodbye = asyncio.Future()
    stays = asyncio.Event()
    nanny = Mock(close=AsyncMock(), worker_address="", close_gracefully=Mock())
    monkeypatch.setattr("hpcgpu.agent.member.hand_over", lambda *_, **__: stays.wait())
    member.nannies = [nanny]
    for _ in range(3):  # scancel signals all processes of a job, and srun its tasks
        member._answer(signal.SIGTERM)()
        member.take_grace(3600.0)  # by rank 0, once
    member._answer(signal.SIGTERM)()
    for _ in range(3):  # turns, in which a limit of 0 s would end it
        await asyncio.sleep(0)
    assert (asking(), member.ended.is_set()) == (1, False)
    member.end(0)
    await member.close()
    await asyncio.sleep(0)
    member._answer(signal.SIGTERM)()  # while the loop ends: asyncio.run would leave a new task pending
    assert asking() == 0


@pytest.mark.parametrize("cores", [1, 3])
async def test_workers_start_as_many_at_once_as_cores(monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
    """One that does not start has a reason, which TimeoutError has not."""
    starting, counts = set[str](), list[int]()

    class Nanny:
        def __init__(self, _: object, __: Settings, spec: WorkerSpec, **___: object) -> None:
            self.name, self.preloads = spec.name, Mock()

        async def start(self) -> None:
            starting.add(self.name)
            for _ in range(5):
                await asyncio.sleep(0)
                counts.append(len(starting))
            starting.remove(self.name)
            if self.name == "w1":
                raise RuntimeError("Worker failed to start.") from TimeoutError("start timed out after 60s.")

    monkeypatch.setattr("hpcgpu.agent.leader.ForkNanny", Nanny)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    member = Member(replace(context(), workers=[WorkerSpec(name=f"w{i}", binding=Mock()) for i in range(6)]))
    member.spawner = Mock()
    (why,) = await member.start_nannies(Mock())
    assert max(counts) == cores
    assert why.startswith("worker w1: not registered with the scheduler within ")
