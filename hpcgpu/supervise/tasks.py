"""Coroutines and callbacks in the background of an event loop, and the times at which they look again."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
from collections.abc import Awaitable, Callable
from typing import ParamSpec, TypeVar

from hpcgpu.model.backoff import Backoff
from hpcgpu.supervise.rounds import Rounds, reason_of

logger = logging.getLogger("distributed.hpcgpu")
Given = ParamSpec("Given")
Answer = TypeVar("Answer")
Failed = Callable[[BaseException], object]
# A thousand workers come within seconds: each look at all jobs is for as many of them as came meanwhile.
GATHER_S = 0.1


class Loop:
    """Work that is done round after round until it is cancelled or says that it is over; see :func:`keep`."""

    def __init__(
        self, work: Callable[[], Awaitable[bool | None]], what: str, backoff: Backoff, changed: Callable[[], object]
    ) -> None:
        self._work, self._changed = work, changed
        self._rounds = Rounds(what, backoff)
        self._task = asyncio.create_task(self._run(), name=what)

    @property
    def trouble(self) -> str:
        """Reason of the present failures, for waiting callers; empty: it works."""
        return self._rounds.trouble

    def done(self) -> bool:
        """Tell whether it is over, or cancelled."""
        return self._task.done()

    async def finished(self) -> None:
        """Wait until it is over."""
        await self._task

    def cancel(self) -> None:
        """End it."""
        self._task.cancel()

    async def _run(self) -> None:
        while True:
            try:
                over = await self._work()
            except (Exception, asyncio.CancelledError) as e:
                if _is_cancelled(e):
                    raise
                wait_s = self._rounds.failed(e)
                self._changed()
                await asyncio.sleep(wait_s)
            else:
                if self._rounds.went_well():
                    self._changed()
                if over:
                    return


def keep(
    work: Callable[[], Awaitable[bool | None]],
    what: str,
    *,
    backoff: Backoff = Backoff(),  # noqa: B008 - frozen
    changed: Callable[[], object] = lambda: None,
) -> Loop:
    """Do work round after round. A round that raises is said once, with its traceback, and after a wait comes the next.

    Parameters
    ----------
    work : callable
        A coroutine function: one round, which itself waits until there is something to do. True: it is over.
    what : str
        The work, as people would call it.
    backoff : Backoff
        How soon the next round comes after one that failed.
    changed : callable
        Called when a round has failed, and when one has gone well again.

    """
    return Loop(work, what, backoff, changed)


class Timer:
    """Calls something at intervals until it is cancelled; see :func:`repeat`."""

    def __init__(self, call: Callable[[], object], every_s: float, what: str) -> None:
        self._call, self._every_s = call, every_s
        self._rounds = Rounds(what, Backoff(every_s, every_s))
        self._arm()

    def cancel(self) -> None:
        """Call it no more."""
        self._timer.cancel()

    def _arm(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._every_s, self._ring)

    def _ring(self) -> None:
        self._arm()  # first: the call may cancel it
        try:
            self._call()
        except Exception as e:
            self._rounds.failed(e)
        else:
            self._rounds.went_well()


def repeat(call: Callable[[], object], every_s: float, what: str) -> Timer:
    """Call something at intervals, as a plain timer does: before tasks that are late. One that raises is said once.

    Parameters
    ----------
    call : callable
        Done within microseconds.
    every_s : float
        The interval.
    what : str
        Name of the work, for people.

    """
    return Timer(call, every_s, what)


def start(work: Callable[[], Awaitable[object]], what: str, failed: Failed) -> asyncio.Task[None]:
    """Do work once. An exception is logged with its traceback and handed to ``failed``, which ends what needs the work.

    Cancelling the task is no failure; a CancelledError that nobody asked for is one.
    """

    async def run() -> None:
        try:
            await work()
        except (Exception, asyncio.CancelledError) as e:
            if _is_cancelled(e):
                raise
            _say(what, e)
            failed(e)

    return asyncio.create_task(run(), name=what)


class Group:
    """Tasks of one owner, which waits for none of them."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Callable[[], Awaitable[object]], what: str, failed: Failed) -> None:
        """See :func:`start`."""
        task = start(work, what, failed)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def cancel(self) -> None:
        """End them all."""
        for task in self._tasks:
            task.cancel()


async def in_thread(call: Callable[[], Answer]) -> Answer:
    """Make a call in a thread, and return when it has ended: also when this is cancelled, which it cannot see.

    Without that the effects of the call would come later, beside those of the next one.
    """
    done = asyncio.create_task(asyncio.to_thread(call))
    try:
        return await asyncio.shield(done)
    except asyncio.CancelledError:
        while not done.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([done])
        if not done.cancelled() and (error := done.exception()):
            _say("what a thread did for a task that was cancelled", error)
        raise


class Alarm:
    """Waits for the first of two times, or for a change; of one event loop.

    Attributes
    ----------
    ask_at_s, wake_at_s : float or None
        By the loop's clock: when there is a question to be asked, and when to look though nothing has happened.

    """

    def __init__(self) -> None:
        self.ask_at_s: float | None = None
        self.wake_at_s: float | None = None
        self._rung = asyncio.Event()

    @property
    def is_time_to_ask(self) -> bool:
        """True once the time for the question has come."""
        return self.ask_at_s is not None and self.now_s() >= self.ask_at_s

    def set_in(self, ask_s: float | None, wake_s: float | None) -> None:
        """Set both times, in so many seconds from now; None: never."""
        now_s = self.now_s()
        self.ask_at_s, self.wake_at_s = (None if s is None else now_s + s for s in (ask_s, wake_s))

    def ring(self) -> None:
        """Look now: something has changed."""
        self._rung.set()

    async def wait(self) -> None:
        """Return when it is time; changes that follow each other closely are one."""
        times = [at_s for at_s in (self.ask_at_s, self.wake_at_s) if at_s is not None]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, min(times) - self.now_s()) if times else None):
                await self._rung.wait()
                await asyncio.sleep(GATHER_S)
        self._rung.clear()

    def now_s(self) -> float:
        """Return the time of the loop's clock."""
        return asyncio.get_running_loop().time()


async def until(look: Callable[[], Awaitable[Answer | None]], every_s: float, limit_s: float = math.inf) -> Answer:
    """Look again and again; return the first answer that is not None.

    Parameters
    ----------
    look : callable
        A coroutine function.
    every_s : float
        The wait between two looks.
    limit_s : float
        No look begins later than this. There is one look at least.

    Raises
    ------
    TimeoutError
        The time is over.

    """
    loop = asyncio.get_running_loop()
    end_s = loop.time() + limit_s
    while (found := await look()) is None:
        await asyncio.sleep(every_s)
        if loop.time() > end_s:
            raise TimeoutError
    return found


def guarded(call: Callable[Given, object], what: str, failed: Failed) -> Callable[Given, None]:
    """Return a callback for timers, signals, descriptors and futures: an exception goes to the log and to ``failed``.

    The event loop alone would log it and go on. A timer that arms itself anew would be dead then, and a readable
    descriptor would stay readable and call again at once, for ever.
    """

    @functools.wraps(call)
    def guard(*args: Given.args, **kwargs: Given.kwargs) -> None:
        try:
            call(*args, **kwargs)
        except Exception as e:
            _say(what, e)
            failed(e)

    return guard


def say_only(_: BaseException) -> None:
    """Do nothing more about an exception: it stands in the log, and nothing depends on the work."""


def _is_cancelled(error: BaseException) -> bool:
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


def _say(what: str, error: BaseException) -> None:
    logger.error("%s failed: %s", what, reason_of(error), exc_info=error)
