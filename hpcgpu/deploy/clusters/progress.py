"""One line about what is being waited for: it changes in place on a terminal, elsewhere each change is a line."""

from __future__ import annotations

import sys
from collections.abc import Callable

from hpcgpu.host import log

# Erase in display, from the cursor to the end of the line (ECMA-48, EL).
_ERASE = "\r\x1b[K"


class Progress:
    """What a cluster shows while it waits.

    Parameters
    ----------
    say : callable
        Takes a line where there is no terminal.
    quiet : bool
        Show nothing.

    """

    def __init__(self, say: Callable[[str], None], quiet: bool = False) -> None:
        self._say, self._quiet = say, quiet
        self._shown = ""
        self._live = sys.stderr.isatty()

    def show(self, text: str) -> None:
        """Show what is true now."""
        if self._quiet or text == self._shown:
            return
        self._shown = text
        if self._live:
            log.write(f"{_ERASE}hpcgpu: {text}")
        else:
            self._say(text)

    def end(self) -> None:
        """Leave what is shown, and go to a line of its own."""
        if self._live and self._shown:
            log.write("\n")
        self._shown = ""
