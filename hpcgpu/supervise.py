"""Background work, whose starter states what happens after an exception, so that nothing ends silently.

Coroutines and callbacks run on an event loop, other work in a thread. After an exception the work logs it, waits and
goes on, or tells its owner, which ends everything that depends on it.

Together: a timer is what such work waits for.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import threading
import time
from collections.abc import Awaitable, Callable
from typing import ParamSpec, TypeVar

from hpcgpu.errors import HpcGpuError, message_of
from hpcgpu.model.waits import Backoff

logger = logging.getLogger("distributed.hpcgpu")
# Waiting callers get an error only after three failures in a row.
_TROUBLE = 3
Given = ParamSpec("Given")
Answer = TypeVar("Answer")
Failed = Callable[[BaseException], object]
# A thousand workers come within seconds: one pass over all jobs serves all that came meanwhile.
GATHER_S = 0.1


class FailureLog:
    """The failures of a piece of repeated work, named in messages: ``"the loop that keeps this cluster's jobs"``."""

    def __init__(self, name: str, backoff: Backoff) -> None:
        self._name, self._backoff = name, backoff
        self.error: BaseException | None = None  # of the last round; None: it succeeded

    @property
    def trouble(self) -> str:
        """A message for callers that wait for the work's results; "" until it has failed a few times in a row."""
        if self.error is None or self._backoff.failures < _TROUBLE:
            return ""
        return f"{self._name} has failed {self._backoff.failures} times in a row: {reason_of(self.error)}"

    def failed(self, error: BaseException) -> float:
        """Log the exception of a round, each reason once; return the seconds until the next round."""
        self.error, self._backoff = error, self._backoff.failed(_kind(error), time.monotonic())
        if self._backoff.is_new:
            with contextlib.suppress(Exception):  # a log filter may raise, and the next round must come
                text = f"{self._name} failed, and goes on in {self._backoff.wait_s:.3g} s: {reason_of(error)}"
                logger.warning("%s", text, exc_info=None if isinstance(error, HpcGpuError) else error)
        return self._backoff.wait_s

    def went_well(self) -> bool:
        """Record a success; return True if the round before failed."""
        if self.error is None:
            return False
        self.error = None
        with contextlib.suppress(Exception):
            logger.info("%s works again", self._name)
        return True


def _kind(error: BaseException) -> str:
    """Return a key that is the same for the same fault: a message may hold a descriptor, an address, a time."""
    if isinstance(error, HpcGpuError):
        return str(error)
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    where = f"{at.tb_frame.f_code.co_filename}:{at.tb_lineno}" if at else ""
    return f"{type(error).__name__} {getattr(error, 'errno', None)} {where}"


def reason_of(error: BaseException) -> str:
    """Return an error in one line: its message if it is hpcgpu's, else also its type."""
    text, kind = message_of(error), type(error).__name__
    return text if isinstance(error, HpcGpuError) or text == kind else f"{kind}: {text}"


class Loop:
    """Work that repeats until it is cancelled or returns True; a round's exception is logged once.

    A round of ``work`` waits until there is something to do. ``name`` is its name in messages. ``backoff`` is the wait
    after a failure; ``changed`` is called when a round fails, and when one succeeds again.
    """

    def __init__(
        self,
        work: Callable[[], Awaitable[bool | None]],
        name: str,
        *,
        backoff: Backoff = Backoff(),  # frozen
        changed: Callable[[], object] = lambda: None,
    ) -> None:
        self._work, self._changed = work, changed
        self._failures = FailureLog(name, backoff)
        self.task = asyncio.create_task(self._run(), name=name)

    @property
    def trouble(self) -> str:
        """The reason of the present failures, for waiting callers; "" if it works."""
        return self._failures.trouble

    def cancel(self) -> None:
        """Cancel it."""
        self.task.cancel()

    async def _run(self) -> None:
        while True:
            try:
                over = await self._work()
            except (Exception, asyncio.CancelledError) as e:
                if _is_cancelled(e):
                    raise
                wait_s = self._failures.failed(e)
                self._changed()
                await asyncio.sleep(wait_s)
            else:
                if self._failures.went_well():
                    self._changed()
                if over:
                    return


class ThreadLoop:
    """Work that a thread repeats until it returns True; a round's exception is logged once.

    A round of ``work`` waits until there is something to do. ``pause`` waits ``backoff``'s seconds after a failure, or
    less when the owner wants an end.
    """

    def __init__(
        self,
        work: Callable[[], bool | None],
        name: str,
        *,
        pause: Callable[[float], object],
        backoff: Backoff = Backoff(),  # frozen
    ) -> None:
        self._work, self._pause = work, pause
        self._failures = FailureLog(name, backoff)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def is_alive(self) -> bool:
        """Return whether the work goes on."""
        return self._thread.is_alive()

    def join(self, timeout_s: float) -> None:
        """Wait until the work has ended; return at once in its own thread."""
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            try:
                over = self._work()
            except BaseException as e:  # also SystemExit: it would end the thread silently
                self._pause(self._failures.failed(e))
            else:
                self._failures.went_well()
                if over:
                    return


class Ticker:
    """Calls a function of microseconds at intervals, before tasks that are late; each exception is logged once."""

    def __init__(self, call: Callable[[], object], every_s: float, name: str) -> None:
        self._call, self._every_s = call, every_s
        self._failures = FailureLog(name, Backoff(every_s, every_s))
        self._arm()

    def cancel(self) -> None:
        """Stop calling."""
        self._timer.cancel()

    def _arm(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._every_s, self._ring)

    def _ring(self) -> None:
        self._arm()  # first: the call may cancel it
        try:
            self._call()
        except Exception as e:
            self._failures.failed(e)
        else:
            self._failures.went_well()


def start(
    work: Callable[[], Awaitable[object]], name: str, failed: Failed, among: set[asyncio.Task[None]] | None = None
) -> asyncio.Task[None]:
    """Run work once; log its exception and call ``failed``, which ends everything that needs the work.

    To cancel the task is no failure; any other CancelledError is a failure. The task is in the set ``among`` until it
    ends, for an owner that waits for none of its tasks.
    """

    async def run() -> None:
        try:
            await work()
        except (Exception, asyncio.CancelledError) as e:
            if _is_cancelled(e):
                raise
            _say(name, e)
            failed(e)

    task = asyncio.create_task(run(), name=name)
    if among is not None:
        among.add(task)
        task.add_done_callback(among.discard)
    return task


def in_thread(call: Callable[Given, Answer], *args: Given.args, **kwargs: Given.kwargs) -> asyncio.Future[Answer]:
    """Run a call in a thread; if Python ends and has shut its threads down, here: functions of atexit may take long."""
    loop, bound = asyncio.get_running_loop(), functools.partial(call, *args, **kwargs)
    try:
        return loop.run_in_executor(None, bound)
    except RuntimeError:
        (done := loop.create_future()).set_result(bound())
        return done


async def to_thread(call: Callable[Given, Answer], *args: Given.args, **kwargs: Given.kwargs) -> Answer:
    """Run a call in a thread; return when it has ended, even if this task is cancelled meanwhile.

    Otherwise the call's effects would come later, beside those of the next one.
    """
    done = in_thread(call, *args, **kwargs)
    try:
        return await asyncio.shield(done)
    except asyncio.CancelledError:
        while not done.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([done])
        if not done.cancelled() and (error := done.exception()):
            _say("a thread of a cancelled task", error)
        raise


class PollTimer:
    """Waits for the first of two times, or for a change; for one event loop."""

    def __init__(self) -> None:
        self.ask_at_s: float | None = None  # on the loop's clock: when there is a question to be asked
        self.wake_at_s: float | None = None  # on the loop's clock: when to check though nothing has happened
        self._rung = asyncio.Event()

    @property
    def is_time_to_ask(self) -> bool:
        """True once the time for the question has come."""
        return self.ask_at_s is not None and self.now_s() >= self.ask_at_s

    def set_in(self, ask_s: float | None, wake_s: float | None) -> None:
        """Set both times in seconds from now; None: never."""
        now_s = self.now_s()
        self.ask_at_s, self.wake_at_s = (None if s is None else now_s + s for s in (ask_s, wake_s))

    def ring(self) -> None:
        """Wake the waiter: something has changed."""
        self._rung.set()

    async def wait(self) -> None:
        """Return when it is time; changes within GATHER_S of each other count as one."""
        times = [at_s for at_s in (self.ask_at_s, self.wake_at_s) if at_s is not None]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, min(times) - self.now_s()) if times else None):
                await self._rung.wait()
                await asyncio.sleep(GATHER_S)
        self._rung.clear()

    def now_s(self) -> float:
        """Return the loop's time."""
        return asyncio.get_running_loop().time()


async def until(look: Callable[[], Awaitable[Answer | None]], every_s: float, limit_s: float = math.inf) -> Answer:
    """Call ``look`` every ``every_s`` seconds, once at least, until it is not None; TimeoutError after ``limit_s``."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + limit_s
    while (result := await look()) is None:
        await asyncio.sleep(every_s)
        if loop.time() > end_s:
            raise TimeoutError
    return result


def log_errors(call: Callable[Given, object], name: str, failed: Failed) -> Callable[Given, None]:
    """Return a callback for timers, signals, descriptors and futures; log its exception and call ``failed``.

    The event loop alone would log it and go on. A timer that arms itself anew would be dead then, and a readable
    descriptor would stay readable and call again at once, for ever.
    """

    @functools.wraps(call)
    def guard(*args: Given.args, **kwargs: Given.kwargs) -> None:
        try:
            call(*args, **kwargs)
        except Exception as e:
            _say(name, e)
            failed(e)

    return guard


def only_log(_: BaseException) -> None:
    """Do nothing more about an exception: it is in the log, and nothing depends on the work."""


def _is_cancelled(error: BaseException) -> bool:
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


def _say(name: str, error: BaseException) -> None:
    logger.error("%s failed: %s", name, reason_of(error), exc_info=error)
