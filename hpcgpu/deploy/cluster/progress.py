"""The lines of a cluster on standard error: results of the script that made it go to standard output."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable, Iterator
from datetime import datetime

from hpcgpu.deploy.status_line import surface
from hpcgpu.plan.jobs.phase import note_lines
from hpcgpu.supervise import tasks

# A shorter wait gets no line.
SHORT_S = 2.0


class Progress:
    """One line about the event that the cluster waits for, with the elapsed time (:mod:`hpcgpu.deploy.status_line`)."""

    def __init__(self, lines: list[tuple[datetime, str]], quiet: bool = False, after_s: float = 0.0) -> None:
        """Take a list for all lines with their times (the cluster's logs), and the delay before a line is shown."""
        self._lines, self._quiet, self._after_s = lines, quiet, after_s
        self._shown = ""
        self._began_s: float | None = None
        self._drawn = False
        self._surface = surface()
        self._noted: set[str] = set()
        self._ticking: tasks.Timer | None = None

    def show(self, text: str) -> None:
        """Show the present state."""
        if self._quiet or text == self._shown:
            return
        self._shown = text
        self._begin()
        if self._waited_s >= self._after_s:
            self._draw()

    def say(self, text: str, logged: str = "") -> None:
        """Print another line; ``logged`` replaces it where other people may read it."""
        self._record(logged or text)
        self._surface.say(text if self._surface.ticks else logged or text)

    def drop(self, text: str) -> None:
        """Remove a printed line, in a notebook: the page shows its content. It stays in the log."""
        self._surface.drop(text)

    def show_notes(self, notes: Iterable[tuple[str, str]], *, quiet: bool) -> None:
        """Print notes about nodes (name, text), each text once."""
        new = [(node, text) for node, text in notes if text not in self._noted]
        self._noted.update(text for _, text in new)
        for line in [] if quiet else note_lines(new):
            self.say(line)

    @contextlib.contextmanager
    def waiting(self, text: str) -> Iterator[None]:
        """Show a text, if the block takes longer than :data:`SHORT_S`; called on the event loop."""
        self._began_s = self._began_s or time.monotonic()
        call = tasks.log_errors(self.show, "the line about a long operation", tasks.only_log)
        later = asyncio.get_running_loop().call_later(SHORT_S, call, text)
        try:
            yield
        finally:
            later.cancel()
            if self._shown in ("", text):
                self.end()

    def end(self) -> None:
        """Leave the line as it is, and begin a new one."""
        if self._ticking:
            self._ticking.cancel()
        if self._drawn and self._surface.ticks:
            self._surface.show(self._shown)  # without the time
        self._surface.end()
        self._shown, self._began_s, self._ticking, self._drawn = "", None, None, False

    @property
    def _waited_s(self) -> float:
        return 0.0 if self._began_s is None else time.monotonic() - self._began_s

    def _draw(self) -> None:
        self._record(self._shown)
        self._surface.show(self._timed)
        self._drawn = True

    @property
    def _timed(self) -> str:
        """The line, with the elapsed time after :data:`SHORT_S`."""
        waited_s = self._waited_s
        return f"{self._shown} [{_elapsed(waited_s)}]" if waited_s >= SHORT_S else self._shown

    def _begin(self) -> None:
        """Start the clock, and its updates if there is an event loop."""
        self._began_s = self._began_s or time.monotonic()
        if self._ticking is None and (self._surface.ticks or self._after_s):
            with contextlib.suppress(RuntimeError):
                asyncio.get_running_loop()
                self._ticking = tasks.repeat(self._ticked, 1.0, "the clock of the progress line")

    def _ticked(self) -> None:
        if not self._shown or self._waited_s < self._after_s:
            return
        if not self._drawn:
            self._draw()
        elif self._surface.ticks:
            self._surface.show(self._timed)

    def _record(self, text: str) -> None:
        self._lines.append((datetime.now(), text))  # as distributed does


def _elapsed(seconds: float) -> str:
    """Format an elapsed time: ``12 s``, ``3 min 05 s``, ``2 h 10 min``."""
    minutes, rest_s = divmod(int(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02} min"
    return f"{minutes} min {rest_s:02} s" if minutes else f"{rest_s} s"
