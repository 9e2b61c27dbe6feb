"""Starts a program and measures it with everything that it starts, until it says that it is ready."""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psutil

_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Cost:
    """Until ready: wall-clock and CPU seconds, number of processes, and their unshared memory."""

    wall_s: float
    cpu_s: float
    processes: int
    uss_mib: float


def _children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


class Tree:
    """A process tree; processes that lose their parent stay in it."""

    def __init__(self) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._start, self._before = time.monotonic(), set(_children())
        self._programs: list[subprocess.Popen[bytes]] = []
        self._selector = selectors.DefaultSelector()
        self._said = b""

    def start(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        """Start a program; what it prints is watched."""
        quiet, watched = subprocess.DEVNULL, subprocess.PIPE
        program = subprocess.Popen(argv, env=env, stdin=quiet, stdout=watched, stderr=subprocess.STDOUT)
        assert program.stdout
        os.set_blocking(program.stdout.fileno(), False)
        self._selector.register(program.stdout, selectors.EVENT_READ)
        self._programs.append(program)

    def wait_for(self, word: bytes, count: int, timeout_s: float = 120) -> Cost:
        """Return the cost up to the moment when ``word`` has been printed ``count`` times."""
        end = time.monotonic() + timeout_s
        while self._said.count(word) < count:
            left = end - time.monotonic()
            if left <= 0 or all(p.poll() is not None for p in self._programs):
                raise RuntimeError(f"not ready: {self._said.decode(errors='replace')[-4000:]}")
            for key, _ in self._selector.select(left):
                data = os.read(key.fd, 1 << 16)
                if not data:
                    self._selector.unregister(key.fileobj)
                self._said += data
        return self._cost()

    def _cost(self) -> Cost:
        wall_s = time.monotonic() - self._start
        cpu_s, uss, count = 0.0, 0, 0
        for process in self.family():
            try:
                # a child's times include those of its own children that have ended
                cpu_s += sum(process.cpu_times()[:4])
                uss += process.memory_full_info().uss
                count += 1
            except psutil.Error:
                continue
        return Cost(wall_s, cpu_s, count, uss / 2**20)

    def family(self) -> list[psutil.Process]:
        """Return the processes of the tree; not what an earlier program left behind and this process was given."""
        return [p for p in _children() if p not in self._before]

    def end(self) -> None:
        """Kill all of it, and wait."""
        while family := _children():
            for process in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            with contextlib.suppress(ChildProcessError):  # whoever lost its parent is a child of this process now
                while os.waitpid(-1, os.WNOHANG)[0]:
                    continue
            time.sleep(_POLL_S)
        for program in self._programs:
            program.wait()
            if program.stdout:
                program.stdout.close()
        self._selector.close()
