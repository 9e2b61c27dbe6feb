"""Signals to processes of which some may end meanwhile: a shell's child, a worker that closes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable


def signal_all(pids: Iterable[int], sig: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, sig)
