"""When the whole machine stood still, or its clock jumped, as seen by a thread that wakes up twice a second."""

from __future__ import annotations

import threading
import time
from collections import deque
from pathlib import Path
from typing import NamedTuple

_EVERY_S = 0.5
_LATE_S = 1.5
_KEPT = 50


class Standstill(NamedTuple):
    """A wake-up that came late, or found another time than was due."""

    at: float
    late_s: float
    jump_s: float

    def __str__(self) -> str:
        at = time.strftime("%H:%M:%S", time.localtime(self.at))
        return f"{at}: nothing ran for {self.late_s:.1f} s; the wall clock went {self.jump_s:+.1f} s beside it"


class Standstills:
    """Those of this process's life; the thread ends with the process."""

    def __init__(self) -> None:
        self._found: deque[Standstill] = deque(maxlen=_KEPT)
        threading.Thread(target=self._watch, daemon=True, name="standstills").start()

    def _watch(self) -> None:
        before_s, wall_s = time.monotonic(), time.time()
        while True:
            time.sleep(_EVERY_S)
            passed_s, jump_s = time.monotonic() - before_s, time.time() - wall_s - (time.monotonic() - before_s)
            if passed_s > _EVERY_S + _LATE_S or abs(jump_s) > _LATE_S:
                self._found.append(Standstill(time.time(), passed_s, jump_s))
            before_s, wall_s = time.monotonic(), time.time()

    def report(self) -> str:
        """Return the last of them, a line each, and how much the machine's processes wait for a core."""
        pressure = Path("/proc/pressure/cpu")
        now = pressure.read_text() if pressure.exists() else "unknown\n"
        seen = "\n".join(map(str, self._found)) or "none"
        return f"{seen}\nwaiting for a core: {now}cores: {Path('/proc/stat').read_text().partition(chr(10))[0]}"
