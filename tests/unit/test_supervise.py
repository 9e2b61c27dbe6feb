"""Background work that raises: it goes on after a pause, or its owner is told."""

import asyncio
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import logged, scaled

from hpcgpu import supervise
from hpcgpu.errors import JobError
from hpcgpu.model.waits import Backoff
from hpcgpu.supervise import ThreadLoop

SOON = Backoff(first_s=0.001, longest_s=0.01)


class Work:
    """Rounds that raise what they are told to, and are over after the last."""

    def __init__(self, *raises: BaseException | None) -> None:
        self.raises, self.rounds = list(raises), 0

    async def __call__(self) -> bool:
        self.rounds += 1
        if error := self.raises.pop(0):
            raise error
        return not self.raises


async def kept(work: Work) -> None:
    await supervise.Loop(work, "the loop", backoff=SOON).task


async def test_a_round_that_raises_is_said_once_and_the_next_one_comes(caplog: pytest.LogCaptureFixture) -> None:
    work = Work(OSError(28, "full: 7"), OSError(28, "full: 8"), KeyError("x"), None)
    await kept(work)
    assert work.rounds == 4
    records = logged(caplog)
    assert [r.getMessage().partition(": ")[2] for r in records] == ["OSError: [Errno 28] full: 7", "KeyError: 'x'"]
    assert all(r.exc_info and r.getMessage().startswith("the loop failed, and goes on in") for r in records)


async def test_loop_reports_trouble_after_some_failures_and_its_end() -> None:
    told: list[str] = []
    work = Work(*[JobError("home is full")] * 4, None, None)
    loop = supervise.Loop(work, "the loop", backoff=SOON, changed=lambda: told.append(loop.trouble))
    assert not loop.task.done()
    await loop.task
    assert loop.task.done()
    assert loop.trouble == ""
    said = "the loop has failed {} times in a row: home is full"
    assert told == ["", "", said.format(3), said.format(4), ""]


async def test_until_polls_for_an_answer_within_its_time() -> None:
    looks: list[int] = []

    async def third() -> str | None:
        looks.append(len(looks))
        return "found" if len(looks) == 3 else None

    async def never() -> None:
        looks.append(len(looks))

    assert await supervise.until(third, 0.001) == "found"
    assert len(looks) == 3
    with pytest.raises(TimeoutError):
        await supervise.until(never, 0.001, 0.0)
    assert len(looks) == 4


async def test_a_loop_that_is_cancelled_ends_and_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    loop = supervise.Loop(asyncio.Event().wait, "the loop")
    await asyncio.sleep(0)
    loop.cancel()
    await asyncio.wait([loop.task])
    assert loop.task.cancelled()
    assert not logged(caplog, 0)


async def test_a_cancellation_that_nobody_asked_for_is_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    work, failed = Work(asyncio.CancelledError(), None), list[BaseException]()
    await kept(work)
    await supervise.start(Work(asyncio.CancelledError()), "the errand", failed.append)
    assert work.rounds == 2
    assert [type(e) for e in failed] == [asyncio.CancelledError]
    assert "the loop failed" in caplog.text
    assert "the errand failed" in caplog.text


async def test_what_a_task_raises_is_logged_and_handed_on(caplog: pytest.LogCaptureFixture) -> None:
    failed: list[BaseException] = []
    await supervise.start(Work(ValueError("no")), "the errand", failed.append)
    await supervise.start(Work(None), "the other errand", failed.append)
    assert [repr(e) for e in failed] == ["ValueError('no')"]
    (record,) = logged(caplog, 0)
    assert (record.levelname, record.getMessage()) == ("ERROR", "the errand failed: ValueError: no")
    assert record.exc_info


async def test_a_set_of_tasks_forgets_those_that_are_over() -> None:
    failed: list[BaseException] = []
    tasks: set[asyncio.Task[None]] = set()
    supervise.start(Work(ValueError("no")), "one that fails", failed.append, tasks)
    stays = supervise.start(asyncio.Event().wait, "one that stays", failed.append, tasks)
    await asyncio.sleep(0.01)
    assert tasks == {stays}
    stays.cancel()
    await asyncio.wait([stays])
    assert not tasks
    assert len(failed) == 1


async def test_a_callback_that_raises_is_logged_and_handed_on(caplog: pytest.LogCaptureFixture) -> None:
    def look(what: dict[str, int]) -> None:
        called.append(what["x"])

    called: list[int] = []
    loop, failed = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()
    call = supervise.log_errors(look, "the look", failed.set_result)
    loop.call_soon(call, {"x": 1})
    loop.call_soon(call, {})
    assert isinstance(await failed, KeyError)
    assert called == [1]
    assert "the look failed: KeyError: 'x'" in caplog.text


async def test_a_timer_goes_on_whatever_it_calls_and_says_it_once(caplog: pytest.LogCaptureFixture) -> None:
    rings: list[None] = []
    done = asyncio.Event()

    def ring() -> None:
        rings.append(None)
        if len(rings) < 3:
            raise OSError("gone")
        done.set()

    timer = supervise.Ticker(ring, 0.001, "the look")
    await done.wait()
    timer.cancel()
    count = len(rings)
    await asyncio.sleep(0.01)
    assert len(rings) == count
    (record,) = logged(caplog)
    assert record.getMessage() == "the look failed, and goes on in 0.001 s: OSError: gone"


async def test_a_timer_may_be_cancelled_by_what_it_calls() -> None:
    rings: list[None] = []
    done = asyncio.Event()
    timer = supervise.Ticker(lambda: (timer.cancel(), rings.append(None), done.set()), 0.001, "the look")
    await done.wait()
    await asyncio.sleep(0.01)
    assert len(rings) == 1


async def test_to_thread_ends_before_its_cancelled_task_goes_on() -> None:
    begun, may_end, ended = threading.Event(), threading.Event(), list[str]()

    def call() -> None:
        begun.set()
        assert may_end.wait(scaled(20))
        ended.append("the call")

    task = asyncio.create_task(supervise.to_thread(call))
    await asyncio.to_thread(begun.wait, 20)
    task.cancel()
    await asyncio.sleep(0)  # the task has been told
    task.cancel()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    ended.append("the task")
    assert ended == ["the call", "the task"]


async def test_to_thread_returns_raises_and_logs_lost_errors(caplog: pytest.LogCaptureFixture) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def fails() -> None:
        begun.set()
        assert may_end.wait(scaled(20))
        raise OSError("full")

    assert await supervise.to_thread(lambda: 3) == 3
    task = asyncio.create_task(supervise.to_thread(fails))
    await asyncio.to_thread(begun.wait, 20)
    task.cancel()
    await asyncio.sleep(0)
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(OSError, match="full"):
        await supervise.to_thread(fails)
    (record,) = logged(caplog)
    assert "OSError: full" in record.getMessage()


@pytest.mark.parametrize("error", [OSError("full"), SystemExit(3), MemoryError()], ids=repr)
def test_thread_loop_that_raises_logs_once_and_goes_on(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    raises, pauses = [error, error, None], list[float]()

    def work() -> bool:
        if now := raises.pop(0):
            raise now
        return True

    loop = ThreadLoop(work, "the mover", pause=pauses.append, backoff=SOON)
    loop.join(scaled(20))
    assert not loop.is_alive()
    assert raises == []
    assert pauses == [0.001, 0.002]
    (record,) = logged(caplog)
    assert record.getMessage().startswith("the mover failed, and goes on in 0.001 s: " + type(error).__name__)
    assert record.exc_info


def test_joining_it_in_its_own_thread_returns() -> None:
    joined = threading.Event()
    ready = threading.Event()

    def work() -> bool:
        ready.wait(scaled(20))
        loop.join(scaled(20))
        joined.set()
        return True

    loop = ThreadLoop(work, "the mover", pause=lambda _: None)
    ready.set()
    assert joined.wait(5)


def test_waits_double_up_to_the_longest() -> None:
    backoff, waits, now_s = Backoff(first_s=1.0, longest_s=10.0), [], 0.0
    for _ in range(6):
        backoff = backoff.failed("full", now_s)
        waits.append(backoff.wait_s)
        now_s += backoff.wait_s
    assert waits == [1, 2, 4, 8, 10, 10]


def test_each_reason_is_new_once() -> None:
    backoff, new = Backoff(), []
    for i, reason in enumerate(["full", "full", "stale", "full", "stale"]):
        backoff = backoff.failed(reason, float(i))
        new.append(backoff.is_new)
    assert new == [True, False, True, False, False]


def test_after_a_calm_the_next_failure_is_the_first_one_again() -> None:
    backoff = Backoff(first_s=1.0, calm_s=60.0).failed("full", 0.0).failed("full", 2.0)
    assert backoff.failed("full", 60.0).failures == 3
    again = backoff.failed("full", 2.0 + backoff.wait_s + 60.0)
    assert (again.failures, again.wait_s, again.is_new) == (1, 1.0, True)


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=200))
def test_wait_after_any_failures_is_within_its_bounds(times: list[float]) -> None:
    backoff = Backoff(first_s=0.5, longest_s=30.0)
    for now_s in sorted(times):
        backoff = backoff.failed("full", now_s)
        assert 0.5 <= backoff.wait_s <= 30.0
        assert backoff.failures >= 1
