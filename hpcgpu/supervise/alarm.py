"""When a loop is to look again: at a time, or as soon as something has changed."""

from __future__ import annotations

import asyncio
import contextlib

# A thousand workers come within seconds: each look at all jobs is for as many of them as came meanwhile.
GATHER_S = 0.1


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
        """Whether the time for the question has come."""
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
