from __future__ import annotations

import asyncio
import threading

import pytest
from waiting import logged, run, scaled

from hpcgpu import supervise
from hpcgpu.errors import JobError
from hpcgpu.model.job import Backoff

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
    await supervise.Loop(work, "the loop", backoff=SOON).finished()


def test_a_round_that_raises_is_said_once_and_the_next_one_comes(caplog: pytest.LogCaptureFixture) -> None:
    work = Work(OSError(28, "full: 7"), OSError(28, "full: 8"), KeyError("x"), None)
    run(lambda: kept(work))
    assert work.rounds == 4
    records = logged(caplog)
    assert [r.getMessage().partition(": ")[2] for r in records] == ["OSError: [Errno 28] full: 7", "KeyError: 'x'"]
    assert all(r.exc_info and r.getMessage().startswith("the loop failed, and goes on in") for r in records)


def test_loop_reports_trouble_after_some_failures_and_its_end() -> None:
    told: list[str] = []

    async def body() -> None:
        work = Work(*[JobError("home is full")] * 4, None, None)
        loop = supervise.Loop(work, "the loop", backoff=SOON, changed=lambda: told.append(loop.trouble))
        assert not loop.done()
        await loop.finished()
        assert loop.done()
        assert loop.trouble == ""

    run(body)
    said = "the loop has failed {} times in a row: home is full"
    assert told == ["", "", said.format(3), said.format(4), ""]


def test_until_polls_for_an_answer_within_its_time() -> None:
    looks: list[int] = []

    async def third() -> str | None:
        looks.append(len(looks))
        return "found" if len(looks) == 3 else None

    async def never() -> None:
        looks.append(len(looks))

    async def body() -> None:
        assert await supervise.until(third, 0.001) == "found"
        assert len(looks) == 3
        with pytest.raises(TimeoutError):
            await supervise.until(never, 0.001, 0.0)
        assert len(looks) == 4

    run(body)


def test_a_loop_that_is_cancelled_ends_and_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> bool:
        loop = supervise.Loop(asyncio.Event().wait, "the loop")
        await asyncio.sleep(0)
        loop.cancel()
        await asyncio.wait([loop._task])
        return loop._task.cancelled()

    assert run(body)
    assert not logged(caplog, 0)


def test_a_cancellation_that_nobody_asked_for_is_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    work, failed = Work(asyncio.CancelledError(), None), list[BaseException]()

    async def body() -> None:
        await kept(work)
        await supervise.start(Work(asyncio.CancelledError()), "the errand", failed.append)

    run(body)
    assert work.rounds == 2
    assert [type(e) for e in failed] == [asyncio.CancelledError]
    assert "the loop failed" in caplog.text
    assert "the errand failed" in caplog.text


def test_what_a_task_raises_is_logged_and_handed_on(caplog: pytest.LogCaptureFixture) -> None:
    failed: list[BaseException] = []

    async def body() -> None:
        await supervise.start(Work(ValueError("no")), "the errand", failed.append)
        await supervise.start(Work(None), "the other errand", failed.append)

    run(body)
    assert [repr(e) for e in failed] == ["ValueError('no')"]
    (record,) = logged(caplog, 0)
    assert (record.levelname, record.getMessage()) == ("ERROR", "the errand failed: ValueError: no")
    assert record.exc_info


def test_a_group_ends_its_tasks_and_forgets_those_that_are_over() -> None:
    failed: list[BaseException] = []

    async def body() -> None:
        group = supervise.Group()
        group.start(Work(ValueError("no")), "one that fails", failed.append)
        group.start(asyncio.Event().wait, "one that stays", failed.append)
        await asyncio.sleep(0.01)
        (left,) = group._tasks
        group.cancel()
        await asyncio.wait([left])
        assert left.cancelled()

    run(body)
    assert len(failed) == 1


def test_a_callback_that_raises_is_logged_and_handed_on(caplog: pytest.LogCaptureFixture) -> None:
    def look(what: dict[str, int]) -> None:
        called.append(what["x"])

    called: list[int] = []

    async def body() -> BaseException:
        loop, failed = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()
        call = supervise.log_errors(look, "the look", failed.set_result)
        loop.call_soon(call, {"x": 1})
        loop.call_soon(call, {})
        return await failed

    assert isinstance(run(body), KeyError)
    assert called == [1]
    assert "the look failed: KeyError: 'x'" in caplog.text


def test_a_timer_goes_on_whatever_it_calls_and_says_it_once(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
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

    rings: list[None] = []
    run(body)
    (record,) = logged(caplog)
    assert record.getMessage() == "the look failed, and goes on in 0.001 s: OSError: gone"


def test_a_timer_may_be_cancelled_by_what_it_calls() -> None:
    async def body() -> None:
        done = asyncio.Event()
        timer = supervise.Ticker(lambda: (timer.cancel(), rings.append(None), done.set()), 0.001, "the look")
        await done.wait()
        await asyncio.sleep(0.01)

    rings: list[None] = []
    run(body)
    assert len(rings) == 1


def test_to_thread_ends_before_its_cancelled_task_goes_on() -> None:
    begun, may_end, ended = threading.Event(), threading.Event(), list[str]()

    def call() -> None:
        begun.set()
        assert may_end.wait(scaled(20))
        ended.append("the call")

    async def body() -> None:
        task = asyncio.create_task(supervise.to_thread(call))
        await asyncio.to_thread(begun.wait, 20)
        task.cancel()
        await asyncio.sleep(0)  # the task has been told
        task.cancel()
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        ended.append("the task")

    run(body)
    assert ended == ["the call", "the task"]


def test_to_thread_returns_raises_and_logs_lost_errors(caplog: pytest.LogCaptureFixture) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def fails() -> None:
        begun.set()
        assert may_end.wait(scaled(20))
        raise OSError("full")

    async def body() -> None:
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

    run(body)
    (record,) = logged(caplog)
    assert "OSError: full" in record.getMessage()
