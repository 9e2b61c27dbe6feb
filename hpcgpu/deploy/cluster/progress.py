"""What a cluster says, on standard error: results of the script that made it go to standard output."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from hpcgpu.host import log
from hpcgpu.plan.jobs.phase import note_lines

# Erase in display, from the cursor to the end of the line (ECMA-48, EL).
_ERASE = "\r\x1b[K"


class Progress:
    """One line about what is waited for, which changes in place on a terminal; elsewhere each change is a line.

    Parameters
    ----------
    lines : list
        Takes each line that is said, with its time: the cluster's logs.
    quiet : bool
        Show nothing.

    """

    def __init__(self, lines: list[tuple[datetime, str]], quiet: bool = False) -> None:
        self._lines, self._quiet = lines, quiet
        self._shown = ""
        self._live = log.is_terminal()
        self._noted: set[str] = set()

    def show(self, text: str) -> None:
        """Show what is true now."""
        if self._quiet or text == self._shown:
            return
        self._shown = text
        self._record(text)
        if self._live:
            log.write(f"{_ERASE}hpcgpu: {text}")
        else:
            log.say(text)

    def say(self, text: str) -> None:
        """Say something else, on a line of its own."""
        self._record(text)
        self.end()
        log.say(text)

    def show_notes(self, notes: Iterable[tuple[str, str]], *, quiet: bool) -> None:
        """Say what people should know of the nodes (name, text), each text once."""
        new = [(node, text) for node, text in notes if text not in self._noted]
        self._noted.update(text for _, text in new)
        for line in [] if quiet else note_lines(new):
            self.say(line)

    def end(self) -> None:
        """Leave what is shown, and go to a line of its own."""
        if self._live and self._shown:
            log.write("\n")
        self._shown = ""

    def _record(self, text: str) -> None:
        self._lines.append((datetime.now(), text))  # noqa: DTZ005 - as distributed does
