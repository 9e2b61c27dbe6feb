"""The end of a leader that does not come by itself."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Self

from hpcgpu.agent.follower import Guest, dismiss
from hpcgpu.agent.zygote import Zygote
from hpcgpu.host import log

# Its script has 2 s, its workers 2, the other nodes 4 and the scheduler 5 (agent.head and .leader, deploy's scheduler).
# Much more on a node that is overloaded; and an end that is forced there for nothing would lose the script's exit code.
LIMIT_S = 60.0


class ForcedEnd:
    """Used as a context manager around a leader's event loop, whose tasks may refuse to end.

    Parameters
    ----------
    zygote : Zygote
        Killed with all that it has forked, and this process after it.
    guests : sequence of Guest
        The followers, who hear a goodbye: else one of them would lead in this process's place.
    limit_s : float
        How long an end may take, in seconds.

    """

    def __init__(self, zygote: Zygote, guests: Sequence[Guest] = (), limit_s: float = LIMIT_S) -> None:
        self._zygote, self._guests, self._limit_s = zygote, guests, limit_s
        self._begun, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def begin(self) -> None:
        """Count from now on; called when the run ends."""
        self._begun.set()

    def __enter__(self) -> Self:
        self._thread.start()  # now: at the end there may be no room for another one
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._begun.set()

    def _watch(self) -> None:
        self._begun.wait()
        if not self._over.wait(self._limit_s):
            self._force()

    def _force(self) -> None:
        try:
            log.say(f"process {os.getpid()} has not ended within {self._limit_s:g} s; it is killed, and its workers")
            self._zygote.kill()
            dismiss(self._guests)
        finally:
            os._exit(os.EX_SOFTWARE)
