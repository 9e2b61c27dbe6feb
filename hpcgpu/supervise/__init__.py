"""Background work, whose starter states what happens after an exception, so that nothing ends silently.

``tasks`` starts coroutines, threads are started here. After an exception the work logs it, waits and goes on, or tells
its owner, which ends everything that depends on it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from hpcgpu.model.command import Backoff
from hpcgpu.supervise.tasks import FailureLog


class Loop:
    """Work that a thread repeats until it returns True; made by :func:`run_thread`."""

    def __init__(
        self, work: Callable[[], bool | None], title: str, pause: Callable[[float], object], backoff: Backoff
    ) -> None:
        self._work, self._pause = work, pause
        self._failures = FailureLog(title, backoff)
        self._thread = threading.Thread(target=self._run, name=title, daemon=True)
        self._thread.start()

    @property
    def trouble(self) -> str:
        """The reason of the present failures, for waiting callers; "" if it works."""
        return self._failures.trouble

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


def run_thread(
    work: Callable[[], bool | None],
    title: str,
    *,
    pause: Callable[[float], object],
    backoff: Backoff = Backoff(),  # frozen
) -> Loop:
    """Repeat work in a thread named ``title`` until it returns True; log a round's exception once and go on.

    A round of ``work`` waits until there is something to do. ``pause`` waits ``backoff``'s seconds after a failure, or
    less when the owner wants an end.
    """
    return Loop(work, title, pause, backoff)
