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

# What is over sooner is not worth a line.
SHORT_S = 2.0


class Progress:
    """One line about what is waited for, with the time that has passed; see :mod:`hpcgpu.deploy.status_line`.

    Parameters
    ----------
    lines : list
        Takes each line that is said, with its time: the cluster's logs.
    quiet : bool
        Show nothing.
    after_s : float
        Begin to show only when something has been waited for so long.

    """

    def __init__(self, lines: list[tuple[datetime, str]], quiet: bool = False, after_s: float = 0.0) -> None:
        self._lines, self._quiet, self._after_s = lines, quiet, after_s
        self._shown = ""
        self._began_s: float | None = None
        self._drawn = False
        self._surface = surface()
        self._noted: set[str] = set()
        self._ticking: tasks.Timer | None = None

    def show(self, text: str) -> None:
        """Show what is true now."""
        if self._quiet or text == self._shown:
            return
        self._shown = text
        self._begin()
        if self._waited_s >= self._after_s:
            self._draw()

    def say(self, text: str, logged: str = "") -> None:
        """Say something else, on a line of its own; ``logged`` stands in its place where others may read it."""
        self._record(logged or text)
        self._surface.say(text if self._surface.ticks else logged or text)

    def drop(self, text: str) -> None:
        """Take back what was said, in a notebook: it is shown in another way. It stays in the log."""
        self._surface.drop(text)

    def show_notes(self, notes: Iterable[tuple[str, str]], *, quiet: bool) -> None:
        """Say what people should know of the nodes (name, text), each text once."""
        new = [(node, text) for node, text in notes if text not in self._noted]
        self._noted.update(text for _, text in new)
        for line in [] if quiet else note_lines(new):
            self.say(line)

    @contextlib.contextmanager
    def waiting(self, text: str) -> Iterator[None]:
        """Say what goes on, if it takes longer than :data:`SHORT_S`; called on the event loop."""
        self._began_s = self._began_s or time.monotonic()
        call = tasks.log_errors(self.show, "the line about what goes on", tasks.only_log)
        later = asyncio.get_running_loop().call_later(SHORT_S, call, text)
        try:
            yield
        finally:
            later.cancel()
            if self._shown in ("", text):
                self.end()

    def end(self) -> None:
        """Leave what is shown, and go to a line of its own."""
        if self._ticking:
            self._ticking.cancel()
        if self._drawn and self._surface.ticks:
            self._surface.show(self._shown)  # how long it took is no news any more
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
        """The line, with the time that has passed if it is worth it."""
        waited_s = self._waited_s
        return f"{self._shown} [{_elapsed(waited_s)}]" if waited_s >= SHORT_S else self._shown

    def _begin(self) -> None:
        """Draw the time that passes; without an event loop nobody does."""
        self._began_s = self._began_s or time.monotonic()
        if self._ticking is None and (self._surface.ticks or self._after_s):
            with contextlib.suppress(RuntimeError):
                asyncio.get_running_loop()
                self._ticking = tasks.repeat(self._ticked, 1.0, "the clock of what is waited for")

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
    """Return a time that passes, as people read it: ``12 s``, ``3 min 05 s``, ``2 h 10 min``."""
    minutes, rest_s = divmod(int(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02} min"
    return f"{minutes} min {rest_s:02} s" if minutes else f"{rest_s} s"
