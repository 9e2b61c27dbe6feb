"""How far a checkpoint is: a table of its names, and a line that changes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hpcgpu import supervise
from hpcgpu.checkpoint.folder import Folder
from hpcgpu.checkpoint.writer import Status
from hpcgpu.deploy.progress import surface
from hpcgpu.report.table import Bar, Column, Shown, Table
from hpcgpu.units import counted

_COLUMNS = (Column("name", kind="name"), Column("chunks"), Column("size", unit="B", kind="number"), Column("kind"))
_COLOUR = "#3b7dd8"
_SHOWN = 5
_LIVE_S, _LAST_S = 1.0, 5.0  # between two looks, where the line changes in place; for the last one


@dataclass(frozen=True, slots=True)
class NameProgress:
    """How far a name is."""

    name: str
    done: int  # chunks on disk
    count: int  # of all
    nbytes: int
    kind: str
    unreadable: str = ""  # why they are computed again


@dataclass(frozen=True, slots=True, repr=False)
class Progress(Shown):
    """How far a checkpoint is, and why it is not further; a table in a notebook and in text.

    Attributes
    ----------
    rows : tuple of NameProgress
        For each name the chunks that are on disk, of all, and their bytes.
    waiting : int
        Finished chunks that are not on disk yet.
    troubles : tuple of str
        Since when, and why, workers cannot write; chunks that cannot be pickled.

    """

    rows: tuple[NameProgress, ...]
    waiting: int = 0
    troubles: tuple[str, ...] = ()

    @property
    def table(self) -> Table:
        """The names, with a bar for each in a notebook."""
        rows = [
            (r.name, Bar(f"{r.done} of {r.count}", _COLOUR, r.done, r.done, r.count), r.nbytes, r.kind)
            for r in self.rows
        ]
        waiting = [f"to be written: {counted(self.waiting, 'finished chunk')}"] if self.waiting else []
        others = [f"{r.name!r} {r.unreadable}" for r in self.rows if r.unreadable]
        return Table(_COLUMNS, rows, notes=(*waiting, *others, *self.troubles))


class ProgressLine:
    """The chunks on disk of each name as a line: in place in a terminal or notebook, else at most each ``every_s``."""

    def __init__(self, look: Callable[[], Sequence[NameProgress]], every_s: float) -> None:
        self._look, self._surface, self._shown = look, surface(), ""
        self._every_s = _LIVE_S if self._surface.is_live else every_s
        self._over = threading.Event()
        self._loop = supervise.ThreadLoop(self._round, "the line about a checkpoint", pause=self._over.wait)

    def close(self) -> None:
        """Show how far it is at the end."""
        self._over.set()
        self._loop.join(_LAST_S)

    def _round(self) -> bool:
        over = self._over.wait(self._every_s)
        text = ", ".join(f"{row.name} {row.done} of {row.count}" for row in self._look())
        if text != self._shown:
            self._surface.show(f"chunks on disk: {text}")
            self._shown = text
        if over:
            self._surface.end()
        return over


def progress_of(folder: Folder, *, every: bool = False) -> tuple[NameProgress, ...]:
    """Return how far each name of a folder is, with ``every`` also by chunks for other Pythons; reads what is new."""
    folder.index.refresh()
    rows = []
    for name in folder.names:
        if manifest := folder.manifest(name):
            run, why = manifest.run, manifest.unreadable
            places = [p for chunk, p in folder.index.chunks.items() if chunk.run == run and (every or not why)]
            kind = manifest.computation.facts["type"].rpartition(".")[2]
            rows.append(NameProgress(name, len(places), manifest.count, sum(p.nbytes for p in places), kind, why))
    return tuple(rows)


def troubles_of(statuses: Sequence[Status]) -> tuple[str, ...]:
    """Return each trouble of the workers once."""
    troubles = dict.fromkeys(status.trouble for status in statuses if status.trouble)
    unsaved = {key: why for status in statuses for key, why in status.unsaved.items()}
    shown = [f"{key} is not saved: {why}" for key, why in list(unsaved.items())[:_SHOWN]]
    more = [f"at least {len(unsaved) - _SHOWN} more are not saved"] if len(unsaved) > _SHOWN else []
    return (*troubles, *shown, *more)
