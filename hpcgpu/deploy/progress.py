"""Progress on stderr: one line that is updated in a terminal or notebook, elsewhere one line for each change."""

from __future__ import annotations

import asyncio
import contextlib
import html
import io
import re
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any

from hpcgpu import supervise
from hpcgpu.host import log
from hpcgpu.plan.jobs.job import Phase
from hpcgpu.plan.jobs.job_text import READY, note_lines

SHORT_S = 2.0  # a shorter wait gets no line
_ERASE = "\r\x1b[K"  # from the cursor to the end of the line (ECMA-48, EL)
_GOOD, _ON_ITS_WAY, _BAD = "green", "yellow", "red"
_COLOURS = {Phase.UP: _GOOD, **dict.fromkeys((Phase.GONE, Phase.UNKNOWN, Phase.STUCK), _BAD)}
_LINE = (
    '<div style="font-family: var(--jp-code-font-family, monospace); font-size: 13px; white-space: pre-wrap">{}</div>'
)


class Surface:
    """A line that changes, and lines beside it that stay: in a file or a pipe each change is a line."""

    is_live = False  # True: the line changes in place, and can show seconds that pass

    def show(self, text: str) -> None:
        """Update the line."""
        log.say(text)

    def say(self, text: str) -> None:
        """Add a line that stays."""
        log.say(text)

    def end(self) -> None:
        """Leave the line as it is."""

    def drop(self, text: str) -> None:
        """Take back a line that stays, where that is possible."""


def surface() -> Surface:
    """Return the surface that people see."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    if getattr(shell, "kernel", None) is not None:  # not IPython on a terminal
        return Notebook(shell)
    return Terminal() if log.is_terminal() else Surface()


class Terminal(Surface):
    """A terminal: the line changes in place, and is cut at the terminal's edge."""

    is_live = True

    def __init__(self) -> None:
        self._open = False

    def show(self, text: str) -> None:
        """Redraw the line."""
        log.write(f"{_ERASE}{self._styled(f'hpcgpu: {text}')}")
        self._open = True

    def say(self, text: str) -> None:
        """Write a separate line."""
        self.end()
        log.say(text)

    def end(self) -> None:
        """Go to the next line."""
        if self._open:
            log.write("\n")
        self._open = False

    def _styled(self, text: str) -> str:
        """Return the text on one line, with colours if the terminal has some and the user wants them."""
        from rich.console import Console
        from rich.text import Text

        out, width = io.StringIO(), max(shutil.get_terminal_size().columns - 1, 20)
        console = Console(file=out, force_terminal=True, width=width, highlight=False, stderr=True)
        line = Text(text, no_wrap=True, overflow="ellipsis", end="")
        line.highlight_regex(r"^hpcgpu:", "bold")
        line.highlight_regex(rf"\b{READY}\b", _GOOD)
        for phase in Phase:
            line.highlight_regex(rf"\b{phase.value}\b", _COLOURS.get(phase, _ON_ITS_WAY))
        console.print(line, end="")
        return out.getvalue()


class Notebook(Surface):
    """A notebook: one display in each cell, which changes; ``shell`` is IPython's."""

    is_live = True

    def __init__(self, shell: Any) -> None:  # of a package that has no types
        self._shell, self._cell = shell, 0
        self._handle: Any = None
        self._lines: list[str] = []
        self._line = ""

    def show(self, text: str) -> None:
        """Show the line below those that stay."""
        self._line = text
        self._update()

    def say(self, text: str) -> None:
        """Add a line that stays."""
        self._lines += [text]
        self._update()

    def end(self) -> None:
        """Let the line stay."""
        self._lines += [self._line] if self._line else []
        self._line = ""

    def drop(self, text: str) -> None:
        """Take back a line that stays: its content is shown in another way."""
        if text in self._lines:
            self._lines.remove(text)
            self._handle.update(self._bundle(), raw=True)

    def _update(self) -> None:
        from IPython.display import display as untyped

        display: Any = untyped
        if self._handle is None or self._cell != self._shell.execution_count:
            self._cell = self._shell.execution_count
            self._lines = self._lines[-1:] if not self._line else []
            self._handle = display(self._bundle(), raw=True, display_id=True)
        else:
            self._handle.update(self._bundle(), raw=True)

    def _bundle(self) -> dict[str, str]:
        lines = [*self._lines, *filter(None, (self._line,))]
        text = "\n".join(f"hpcgpu: {line}" for line in lines)
        return {"text/plain": text, "text/html": _LINE.format("\n".join(map(_linked, lines)))}


def _linked(line: str) -> str:
    """Return a line as HTML, with addresses as links."""
    return re.sub(
        r"(^| )((?:https?://|/user/|/node/)[^ ]*)", r'\1<a href="\2" target="_blank">\2</a>', html.escape(line)
    )


class Progress:
    """One line about the event that a cluster waits for, with the elapsed time, and lines beside it."""

    def __init__(self, lines: list[tuple[datetime, str]], quiet: bool = False, after_s: float = 0.0) -> None:
        """Take a list for all lines with their times (the cluster's logs), and the delay before a line is shown."""
        self._lines, self._quiet, self._after_s = lines, quiet, after_s
        self._shown = self._drawn = ""
        self._began_s: float | None = None
        self._surface = surface()
        self._noted: set[object] = set()
        self._ticking: supervise.Ticker | None = None

    def show(self, text: str) -> None:
        """Show the present state."""
        if self._quiet or text == self._shown:
            return
        self._shown, self._began_s = text, self._began_s or time.monotonic()
        if self._ticking is None and (self._surface.is_live or self._after_s):
            with contextlib.suppress(RuntimeError):  # no event loop
                asyncio.get_running_loop()
                self._ticking = supervise.Ticker(self._draw, 1.0, "the clock of the progress line")
        self._draw()

    def say(self, text: str, logged: str = "") -> None:
        """Print another line; ``logged`` replaces it where other people may read it."""
        self._record(logged or text)
        self._surface.say(text if self._surface.is_live else logged or text)

    def drop(self, text: str) -> None:
        """Remove a printed line, in a notebook: the page shows its content. It stays in the log."""
        self._surface.drop(text)

    def show_notes(
        self, notes: Iterable[tuple[str, str]], absent: Iterable[tuple[str, str]] = (), *, quiet: bool
    ) -> None:
        """Print notes about nodes (name, text), each text once, and why workers are absent, once for each node."""
        new = [(node, text) for node, text in notes if text not in self._noted]
        new += [note for note in dict.fromkeys(absent) if note not in self._noted]
        self._noted.update([*new, *(text for _, text in new)])
        for line in [] if quiet else note_lines(new):
            self.say(line)

    @contextlib.contextmanager
    def waiting(self, text: str) -> Iterator[None]:
        """Show a text, if the block takes longer than :data:`SHORT_S`; called on the event loop."""
        self._began_s = self._began_s or time.monotonic()
        call = supervise.log_errors(self.show, "the line about a long operation", supervise.only_log)
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
        if self._drawn and self._surface.is_live:
            self._surface.show(self._shown)  # without the time
        self._surface.end()
        self._shown, self._drawn, self._began_s, self._ticking = "", "", None, None

    def _draw(self) -> None:
        """Show the line, if it is time, with the elapsed time after :data:`SHORT_S`."""
        waited_s = time.monotonic() - (self._began_s or time.monotonic())
        if not self._shown or waited_s < self._after_s or (self._drawn == self._shown and not self._surface.is_live):
            return
        if self._drawn != self._shown:
            self._record(self._shown)
        self._drawn = self._shown
        self._surface.show(f"{self._shown} [{_elapsed(waited_s)}]" if waited_s >= SHORT_S else self._shown)

    def _record(self, text: str) -> None:
        self._lines.append((datetime.now(), text))  # as distributed does


def _elapsed(seconds: float) -> str:
    """Format an elapsed time: ``12 s``, ``3 min 05 s``, ``2 h 10 min``."""
    minutes, rest_s = divmod(int(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02} min"
    return f"{minutes} min {rest_s:02} s" if minutes else f"{rest_s} s"
