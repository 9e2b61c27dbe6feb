"""Threads in the background."""

from __future__ import annotations

import threading
from collections.abc import Callable

from hpcgpu.model.backoff import Backoff
from hpcgpu.supervise.rounds import Rounds


class Loop:
    """Work that a thread does round after round until it says that it is over; see :func:`keep`."""

    def __init__(
        self, work: Callable[[], bool | None], what: str, pause: Callable[[float], object], backoff: Backoff
    ) -> None:
        self._work, self._pause = work, pause
        self._rounds = Rounds(what, backoff)
        self._thread = threading.Thread(target=self._run, name=what, daemon=True)
        self._thread.start()

    @property
    def trouble(self) -> str:
        """Reason of the present failures, for waiting callers; empty: it works."""
        return self._rounds.trouble

    def is_alive(self) -> bool:
        """Tell whether it is not over."""
        return self._thread.is_alive()

    def join(self, timeout_s: float) -> None:
        """Wait until it is over; at once in its own thread."""
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            try:
                over = self._work()
            except BaseException as e:  # also SystemExit: it would end the thread without a word
                self._pause(self._rounds.failed(e))
            else:
                self._rounds.went_well()
                if over:
                    return


def keep(
    work: Callable[[], bool | None],
    what: str,
    *,
    pause: Callable[[float], object],
    backoff: Backoff = Backoff(),  # noqa: B008 - frozen
) -> Loop:
    """Do work in a thread, round after round. A round that raises is said once, with its traceback; the next one comes.

    Parameters
    ----------
    work : callable
        One round, which itself waits until there is something to do. True: it is over.
    what : str
        The work, as people would call it; the thread's name, too.
    pause : callable
        Waits so many seconds after a round that failed, or less when the owner wants an end.
    backoff : Backoff
        How long that is.

    """
    return Loop(work, what, pause, backoff)
