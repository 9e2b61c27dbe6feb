"""What deploy has in the background meets what nobody expected; leaders without workers, workers that have paused."""

import asyncio
import errno
import json
import math
import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, MagicMock, Mock, call

import pytest
from comms import Comm
from distributed import Client, Nanny, Scheduler, Worker
from distributed.comm import CommClosedError
from distributed.core import Status
from fleets import make_fleet, make_run
from programs import python
from waiting import LIMIT_S, VirtualTime, aside, failure, failures, scaled, until, when

from hpcgpu.agent.leader import CANCELLED_S
from hpcgpu.batch import Pbs
from hpcgpu.deploy.cluster.classes import JobAdaptive
from hpcgpu.deploy.compat import MemoryManager
from hpcgpu.deploy.jobs import Run, abandoned
from hpcgpu.deploy.jobs.batch_client import Submitter
from hpcgpu.deploy.network.lease import LeaseHolder, keep_touched, touch
from hpcgpu.deploy.processes.control import Child
from hpcgpu.deploy.processes.leaders import LeaderConnections
from hpcgpu.deploy.processes.lease_server import LeaseServer
from hpcgpu.deploy.processes.nanny import ForkedWorker, ProcessHandle
from hpcgpu.deploy.processes.saving import save
from hpcgpu.deploy.processes.stalls import StallDetector
from hpcgpu.errors import JobError, SpillError
from hpcgpu.model import JobSpec, Patience, RunDocument, Settings
from hpcgpu.plan.jobs.job import Job
from hpcgpu.plan.jobs.reconcile import Policy
from hpcgpu.spill.distributed.plugin import SpillPlugin
from hpcgpu.spill.distributed.trouble import TROUBLE


class Flaky:
    """Raises so many times, then answers; counts the calls."""

    def __init__(self, error: Exception, times: float = float("inf"), answer: object = None) -> None:
        self.error, self.left, self.answer, self.calls = error, times, answer, 0

    def __call__(self, *_: object, **__: object) -> Any:
        self.calls += 1
        if self.left > 0:
            self.left -= 1
            raise self.error
        return self.answer

    async def later(self, *_: object, **__: object) -> Any:
        return self()


# --- the jobs of an elastic cluster


@pytest.mark.usefixtures("pbs")
@pytest.mark.parametrize("part", ["save", "workers"])
async def test_job_loop_goes_on_after_an_error(
    part: str, log: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its home is full; or what is known of the workers cannot be read."""
    flaky = Flaky(OSError(errno.ENOSPC, "No space left on device"), answer={})
    troubles: list[str] = []
    owned = make_run(tmp_path / "run", Pbs())
    owned.add([Job(id="1.login01")])  # which the server does not know
    if part == "save":
        monkeypatch.setattr(owned, "save", flaky)
    calls = {"workers": flaky} if part == "workers" else {}
    calls["changed"] = lambda: troubles.append(fleet.trouble)
    fleet = make_fleet(owned, Policy(patience=Patience(ask_s=0.01)), JobSpec(name="x", argv=("true",)), **calls)
    await when(lambda: troubles and troubles[-1])
    assert "No space left on device" in fleet.trouble
    count, flaky.left = flaky.calls, 0
    fleet.alarm.ring()
    await when(lambda: not owned.members and not fleet.trouble)
    assert flaky.calls > count
    fleet.stop()
    assert failure(log).startswith(
        "the loop that looks after this cluster's jobs failed, and goes on in 0.5 s: OSError"
    )
    assert "the loop that looks after this cluster's jobs works again" in log.text


@pytest.mark.usefixtures("pbs")
async def test_a_submission_that_cannot_be_written_down_is_none() -> None:
    full = Flaky(OSError(errno.ENOSPC, "full"), times=1)
    submissions = Submitter(Pbs(), JobSpec(name="x", argv=("true",)), print, Patience(), write=full.later)
    with pytest.raises(OSError, match="full"):
        await anext(submissions.submit(1, ()))
    assert not submissions.unanswered


@pytest.mark.parametrize(("error", "tracebacks"), [(CommClosedError("gone"), 0), (ValueError("no such worker"), 1)])
async def test_an_errand_that_fails_is_said(
    error: Exception, tracebacks: int, log: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    said: list[str] = []
    fleet = make_fleet(make_run(tmp_path / "run", Pbs()), Policy(), say=said.append)
    fleet._send(Flaky(error).later, ["tls://10.0.0.1:1"])
    await when(lambda: said)
    assert said[0].startswith("workers tls://10.0.0.1:1: ")
    assert str(error) in said[0]
    assert len(failures(log)) == tracebacks


@pytest.mark.usefixtures("pbs")
async def test_the_look_for_silent_workers_goes_on(log: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    scheduler = SimpleNamespace(hpcgpu_silent=Flaky(ValueError("no"), times=1, answer=["a"]).later)
    view = {"scheduler": lambda: scheduler, "look_s": 0.01}
    fleet = make_fleet(make_run(tmp_path / "run", Pbs()), Policy(), JobSpec(name="a", argv=("a",)), **view)
    await when(lambda: fleet.view.silent == {"a"})
    fleet.stop()
    assert failure(log).startswith("the search for workers that have fallen silent failed, and goes on in")


async def test_adapting_goes_on_and_says_once_what_it_cannot(log: pytest.LogCaptureFixture) -> None:
    cluster = MagicMock(workers_of=lambda _: 1, pools={}, adapt_to=AsyncMock())
    cluster.__bool__.return_value = False  # distributed's Adaptive leaves it alone
    adaptive = JobAdaptive(cluster, interval="0.01s")
    adaptive.safe_target = Flaky(CommClosedError("gone"), times=3, answer=2).later
    for _ in range(4):  # distributed's timer
        await adaptive.adapt()
    cluster.adapt_to.assert_awaited_once_with(2, "")
    assert failure(log).startswith("the count of workers that have work failed, and goes on in 0.01 s: CommClosed")


# --- the lease


@pytest.mark.parametrize(("lease_s", "times"), [(1.0, 2), (0.3, float("inf"))], ids=["goes on", "is lost"])
async def test_signs_of_life_after_one_that_raised(lease_s: float, times: float, log: pytest.LogCaptureFixture) -> None:
    """They go on; who can give none for the time of a lease is told once, and why."""
    lost, flaky = list[str](), Flaky(ValueError("not understood"), times)
    holder = LeaseHolder(SimpleNamespace(hpcgpu_lease=flaky.later), lease_s, lost.append, lambda: False)
    await when(lambda: lost or (flaky.left == 0 and flaky.calls > 4))
    calls = flaky.calls
    await asyncio.sleep(0.2)
    assert not lost or flaky.calls == calls
    holder.stop()
    assert lost == ([] if times == 2 else ["not understood"])
    assert failure(log).startswith("the loop that gives the scheduler signs of life failed, and goes on")


async def test_lease_before_submission_is_renewed_after_any_error(log: pytest.LogCaptureFixture) -> None:
    loop = keep_touched(Path("/tmp/with\0nul"), 0.1)
    await when(lambda: failures(log))
    assert not loop.task.done()
    loop.cancel()
    assert "embedded null " in failure(log)  # byte; from Python 3.13 on: character


@pytest.mark.parametrize("cancelled", [True, False])
async def test_lease_before_submission_ends_with_its_file(
    cancelled: bool, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    """Also if it is given up while a thread touches the file."""
    begun, gate = list[object](), threading.Semaphore(1)  # for the first call

    class Gated(ThreadPoolExecutor):
        def submit(self, call: Callable[[], object]) -> Any:
            begun.append(call)
            return super().submit(lambda: gate.acquire() and call())

    asyncio.get_running_loop().set_default_executor(Gated())
    touch(tmp_path)
    loop = keep_touched(tmp_path, 0.1)
    await when(lambda: len(begun) == 2)
    (tmp_path / "lease").unlink()
    if cancelled:
        loop.cancel()
    gate.release()
    await asyncio.wait([loop.task])
    assert failures(log) == []


@pytest.mark.parametrize("part", ["send", "woken"])
async def test_silent_client_ends_the_job_after_a_failed_check(part: str, log: pytest.LogCaptureFixture) -> None:
    sends = Flaky(RuntimeError("no"), times=part == "send")
    workers = SimpleNamespace(values=Flaky(RuntimeError("no"), times=part == "woken", answer=()))
    lease = LeaseServer(SimpleNamespace(workers=workers), SimpleNamespace(send=sends), 40.0, rank_pid=0)
    lease.watch(detached=False)
    if part == "woken":
        lease._looked -= 100  # as if this process had been stopped
        await when(lambda: failures(log))
    lease._heard -= 100
    await when(lambda: sends.calls == (2 if part == "send" else 1))
    assert failure(log) == "the check for the client's signs of life failed, and goes on in 1 s: RuntimeError: no"


# --- processes


async def test_a_leader_whose_words_are_not_understood_is_let_go() -> None:
    leaders = LeaderConnections(SimpleNamespace(send=lambda *_, **__: None))
    with pytest.raises(ValueError, match="garbage"):
        await leaders.hold(Comm(end=ValueError("garbage")), node="n1", notes=("note",))
    assert leaders.notes() == []
    async with asyncio.timeout(1):  # dismiss() alone would wait for 4 s
        await leaders.dismiss()


class NannyOf:
    """What a ForkedWorker asks of its nanny."""

    status = Status.running
    name, rank, nthreads, services, resources = "w", 0, 1, {}, {}
    scheduler_addr = _original_local_dir = address = ""
    validate, silence_logs, death_timeout, preload, preload_argv = False, None, 1, (), ()
    security, contact_address, worker_kwargs, spec, env = None, None, {}, None, {}
    memory_manager, stream_heartbeats = SimpleNamespace(memory_limit=0), False

    def __init__(self, spawn: Callable[..., Child]) -> None:
        self.spawner = SimpleNamespace(spawn=spawn)
        self.closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._on_worker_exit_sync = Flaky(RuntimeError("nobody knows"))

    async def close(self, reason: str) -> None:
        self.closed.set_result(reason)


async def test_a_nanny_that_cannot_fork_ends() -> None:
    """distributed's would stay, without a worker."""
    nanny = NannyOf(Flaky(OSError(errno.EMFILE, "Too many open files")))
    with pytest.raises(OSError, match="Too many open files"):
        await ForkedWorker(nanny).start()
    assert (await nanny.closed).startswith("worker w cannot be started again: OSError")


async def test_a_nanny_that_cannot_take_its_workers_end_ends(log: pytest.LogCaptureFixture) -> None:
    ours, theirs = socket.socketpair()
    child = Child(1 << 30, ours, asyncio.get_running_loop().create_future())
    nanny = NannyOf(lambda *_: child)
    with theirs:
        theirs.send(json.dumps({"op": "started", "address": "tcp://x", "dir": ""}).encode() + b"\n")
        await ForkedWorker(nanny).start()
    child.exited.set_result(-9)
    assert await nanny.closed == "worker w cannot be started again: RuntimeError('nobody knows')"
    assert "the nanny's look at the end of worker w failed: RuntimeError: nobody knows" in failures(log)


async def test_an_end_that_overtakes_a_workers_end_is_no_error(log: pytest.LogCaptureFixture) -> None:
    closing = asyncio.Event()

    async def close(**_: object) -> None:
        closing.set()
        await asyncio.Event().wait()  # for the other one that closes this nanny

    nanny = SimpleNamespace(status=Status.closing_gracefully, close=close)
    answering = asyncio.create_task(Nanny._on_worker_exit(nanny, 0))
    await closing.wait()
    answering.cancel()  # as Server.close does with all that goes on
    await asyncio.wait([answering])
    assert answering.cancelled()
    assert failures(log) == []


def test_a_worker_that_cannot_close_as_it_is_told_ends() -> None:
    """Its main coroutine waits for the close, which would never come."""
    code = """
import asyncio, json, socket
from types import SimpleNamespace
from hpcgpu.deploy.processes import worker
from hpcgpu.deploy.processes.control import Control

async def main():
    ours, theirs = socket.socketpair()
    ours.send(json.dumps({"op": "stop"}).encode() + b"\\n")
    worker.stop_on_request(SimpleNamespace(close=None), await Control.open(theirs))
    await asyncio.sleep(60)

asyncio.run(main())
"""
    ended = python(code)
    assert ended.returncode == 1
    assert "the end of the worker failed: TypeError" in ended.stderr


async def test_worker_that_lost_data_closes_if_hand_over_fails(log: pytest.LogCaptureFixture) -> None:
    closed = asyncio.Event()
    loop = SimpleNamespace(add_callback=asyncio.get_running_loop().call_soon_threadsafe)
    plugin = SpillPlugin()
    fails, close = AsyncMock(side_effect=RuntimeError("cudaErrorIllegalAddress")), AsyncMock()
    close.side_effect = lambda **_: closed.set()
    plugin.worker = SimpleNamespace(loop=loop, close_gracefully=fails, close=close)
    plugin._on_fault(SpillError("k cannot be read back"))
    await closed.wait()
    assert "the worker's data could not be handed over" in failures(log)


def test_memory_check_goes_on_and_logs_its_failure_once(log: pytest.LogCaptureFixture) -> None:
    simulated = Flaky(ValueError("no number"), times=3, answer=0)
    process = SimpleNamespace(process=ProcessHandle(os.getpid()))
    nanny = SimpleNamespace(nthreads=1, periodic_callbacks={}, process=process)
    manager = MemoryManager(nanny, memory_limit=1 << 60, simulated_bytes=simulated)
    for _ in range(4):  # tornado's timer
        manager.memory_monitor(nanny)
    assert simulated.calls == 4
    assert failure(log) == "the look at a worker's memory failed, and goes on in 0.1 s: ValueError: no number"


def test_a_worker_that_has_just_ended_need_not_be_killed() -> None:
    ProcessHandle(1 << 30).terminate()  # above any pid of Linux


# --- the guard of a run


def test_a_guard_goes_on_until_the_run_is_ended(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    """Its record cannot be read for a while, as with a file server that has lost the handle."""
    folder = tmp_path / "run"
    folder.mkdir(0o700)
    (folder / "record").mkdir()
    settings = Settings(client_grace_s=0.1)
    left = Run.begin(RunDocument(settings=settings, shape="gang", folder=str(folder)), "slurm", None)
    left.submitting = False
    guarding = aside(lambda: asyncio.run(abandoned.abandon(folder, left.owner.token)))
    until(lambda: failures(log), "a failure is said", while_=guarding)
    (folder / "record").rmdir()
    left.save()
    guarding.result(LIMIT_S)
    assert not folder.exists()
    assert failures(log)[0].startswith(f"the end of the run in {folder} failed, and goes on in")


def is_last(told: Mock, working: int, died: str = "") -> bool:
    """Tell whether this is the last that rank 0 was told."""
    return told.send.call_args == call("leaders", working=working, died=died)


async def test_end_of_the_last_workers_is_told_with_their_ends() -> None:
    told = Mock()
    leaders = LeaderConnections(told)
    retired, none, broken = Comm({"died": ""}), Comm(), Comm()
    async with asyncio.TaskGroup() as serving:
        serving.create_task(leaders.hold(none, node="n0"))
        serving.create_task(leaders.hold(retired, node="n1", workers=2))
        await when(lambda: is_last(told, 0))
        assert leaders.none_come()
        late = serving.create_task(leaders.hold(broken, node="n2", workers=2))
        await when(lambda: is_last(told, 1))
        broken.abort()
        await late
        assert leaders.none_come()
        retired.abort()
        none.abort()


async def test_how_workers_died_is_told() -> None:
    told, comm = Mock(), Comm({"died": "worker b: nanny-instantiate-timeout"})
    serving = asyncio.create_task(LeaderConnections(told).hold(comm, node="n1", workers=2))
    await when(lambda: is_last(told, 0, "worker b: nanny-instantiate-timeout"))
    comm.abort()
    await serving


async def test_a_lost_leader_is_told_at_once() -> None:
    told, lost = Mock(), Comm()
    leaders = LeaderConnections(told, takeover_s=0.0)
    lost.abort()
    await leaders.hold(lost, node="n1", workers=2)
    assert is_last(told, 0, "node n1 lost its leader")
    assert call("leader_lost", node="n1") in told.send.call_args_list
    assert leaders.none_come()
    assert leaders.absent == [("n1", "its leader is lost, and its workers with it")] * 2
    await leaders.hold(Comm("bye"), node="n1", workers=2)  # another rank of this node has taken over
    assert leaders.absent == []


async def test_where_more_may_come_nobody_is_told() -> None:
    told, comm = Mock(), Comm({"died": "worker a: nanny-close"})
    leaders = LeaderConnections(told, grows=True)
    serving = asyncio.create_task(leaders.hold(comm, node="n1", workers=2))
    await when(lambda: not comm.messages)
    comm.abort()
    await serving
    assert not leaders.none_come()
    assert told.send.call_args_list == [call("leader_lost", node="n1")]


async def test_all_workers_paused_is_one_error_and_tasks_go_on_later() -> None:
    reports: asyncio.Queue[dict[str, str]] = asyncio.Queue()
    control = SimpleNamespace(send=lambda _, **report: reports.put_nowait(report))
    async with (
        Scheduler(port=0, dashboard=False) as scheduler,
        Worker(scheduler.address, name="a", memory_limit=0) as worker,
        Client(scheduler.address, asynchronous=True) as client,
    ):
        there = await client.scatter(1)
        stalls = StallDetector(scheduler, control, 0.5)
        worker.metrics[TROUBLE] = lambda _: "no space left on device"
        worker.status = Status.paused
        await worker.heartbeat()
        waiting = client.submit(lambda x: x + 1, there)
        with pytest.raises(JobError, match=r"all workers have paused for 0.5 s.*a has .*\(no space left on device\)"):
            await asyncio.wait_for(waiting, scaled(30))
        assert await asyncio.wait_for(there, scaled(30)) == 1
        assert await reports.get() == {"why": "all workers have paused", "text": stalls.reason}
        assert "take more workers, memory (memory_limit)" in stalls.reason
        assert [facts["action"] for _, facts in scheduler.get_events("hpcgpu")] == ["stalled"]
        worker.status = Status.running
        assert await asyncio.wait_for(client.submit(lambda x: x + 1, there, pure=False), scaled(30)) == 2
        assert await reports.get() == {"why": "", "text": ""}
        assert stalls.reason == ""
        assert reports.empty()
        stalls.close()


async def test_tasks_without_a_worker_fail_only_if_none_can_come() -> None:
    reports: asyncio.Queue[dict[str, str]] = asyncio.Queue()
    control = SimpleNamespace(send=lambda _, **report: reports.put_nowait(report))
    asked, none_come = 0, False

    def ask() -> bool:
        nonlocal asked
        asked += 1
        return none_come

    async with (
        Scheduler(port=0, dashboard=False) as scheduler,
        Client(scheduler.address, asynchronous=True) as client,
    ):
        stalls = StallDetector(scheduler, control, 0.1, ask)
        waiting = client.submit(lambda: 1)
        await asyncio.wait_for(when(lambda: asked > 30), scaled(30))  # two and a half times as long
        assert (waiting.status, reports.empty()) == ("pending", True)
        none_come = True
        with pytest.raises(JobError, match=r"no worker is left, and none comes: tasks have waited for 0.1 s"):
            await asyncio.wait_for(waiting, scaled(30))
        assert (await reports.get())["why"] == "no worker is left, and none comes"
        stalls.close()


async def test_resource_that_no_worker_has_is_one_warning() -> None:
    async with (
        Scheduler(port=0, dashboard=False) as scheduler,
        Worker(scheduler.address, resources={"GPU": 1}),
        Client(scheduler.address, asynchronous=True) as client,
    ):
        stalls = StallDetector(scheduler, SimpleNamespace(), 0.1)
        with pytest.warns(UserWarning, match=r"such as 'one' .*resource GPUU=1; the workers have GPU=1") as seen:
            waiting = [client.submit(abs, -1, key=key, resources={"GPUU": 1}) for key in ("one", "two")]
            await asyncio.wait_for(when(lambda: len(seen) == 1), scaled(30))
            waiting.append(client.submit(abs, -1, key="three", resources={"GPU": 2}))
            await asyncio.wait_for(when(lambda: len(seen) == 2), scaled(30))
        assert "'three' wait for a worker with the resource GPU=2" in str(seen[1].message)
        async with Worker(scheduler.address, resources={"GPUU": 1, "GPU": 2}):
            assert await asyncio.wait_for(client.gather(waiting), scaled(30)) == [1, 1, 1]
        stalls.close()


def test_answer_that_does_not_come_leaves_time_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broadcast(msg: dict[str, Any], workers: list[str], **_: Any) -> dict[str, list[str]]:
        await asyncio.sleep(math.inf if workers == ["hangs"] else msg["limit_s"])
        return {workers[0]: ["1 chunk lacks"]}

    workers = {name: SimpleNamespace(name=name) for name in ("hangs", "lives")}
    scheduler: Any = SimpleNamespace(worker_plugins={"hpcgpu-checkpoint x": 0}, workers=workers, broadcast=broadcast)
    texts = ["worker hangs has not answered whether it has saved all", "worker lives: 1 chunk lacks"]
    assert (clock := VirtualTime()).run(lambda: save(scheduler, CANCELLED_S), monkeypatch) == texts
    assert clock.now_s < 5, "the KillWait of some sites"
