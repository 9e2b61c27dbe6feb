"""Starts a program and measures it with everything that it starts, until it says that it is ready."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import selectors
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil

_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.02
_LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class Cost:
    """Until ready: wall-clock and CPU seconds, number of processes, and their unshared memory."""

    wall_s: float
    cpu_s: float
    processes: int
    uss_mib: float


class Memory(NamedTuple):
    """MiB (PSS: what processes share is divided among them): of a tree, and of it without the programs at its top."""

    all_mib: float
    below_mib: float


def pss_mib(pid: int) -> float:
    """Return the PSS of a process; 0 when it has ended."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")) / 1024


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
            self._read(end - time.monotonic())
        return self._cost()

    def peak_until(self, word: bytes, timeout_s: float) -> tuple[str, Memory]:
        """Return the line that ``word`` begins, once it is printed, and the most memory seen at one moment till then.

        One look takes as long as the kernel needs to walk all page tables; it has 5 % of the time.
        """
        end, peak = time.monotonic() + timeout_s, Memory(0.0, 0.0)
        while not (found := re.search(rb"^" + word + rb" (.*) \.$", self._said, re.M)):
            began = time.monotonic()
            peak = max(peak, self.memory(), key=lambda m: m.all_mib)
            until = time.monotonic() + max(_LOOK_S, 19 * (time.monotonic() - began))
            while time.monotonic() < until and not re.search(rb"^" + word + rb" .* \.$", self._said, re.M):
                self._read(end - time.monotonic(), until - time.monotonic())
        return found[1].decode(), peak

    def memory(self) -> Memory:
        """Return the PSS of all processes, and of those that were not started here."""
        mib = {process.pid: pss_mib(process.pid) for process in self.family()}
        return Memory(sum(mib.values()), sum(mib.values()) - sum(mib.get(p.pid, 0) for p in self._programs))

    def _read(self, left_s: float, wait_s: float | None = None) -> None:
        """Take what the programs have printed; wait for it, for ``wait_s`` at most."""
        if left_s <= 0 or all(p.poll() is not None for p in self._programs):
            raise RuntimeError(f"not ready: {self._said.decode(errors='replace')[-4000:]}")
        for key, _ in self._selector.select(left_s if wait_s is None else max(0, min(left_s, wait_s))):
            data = os.read(key.fd, 1 << 16)
            if not data:
                self._selector.unregister(key.fileobj)
            self._said += data

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

    def finish(self, timeout_s: float) -> None:
        """Give the programs time to end by themselves."""
        for program in self._programs:
            with contextlib.suppress(subprocess.TimeoutExpired):
                program.communicate(timeout=timeout_s)

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
