"""The ranks that have not come to the rendezvous: looked for at its deadline only, so it costs nothing if all come.

A rank at the rendezvous has a title that the others of its node see in /proc, where only its owner can put it. Each
node writes the ranks that it sees into a folder that the nodes may share.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from hpcgpu.errors import HpcGpuError
from hpcgpu.host import log, pids, process
from hpcgpu.launch.environment import read_launch, read_rank
from hpcgpu.model import CpuSet, RankFacts

if TYPE_CHECKING:
    from pathlib import Path

# A rank's title while it waits for the others; 15 characters are kept.
TITLE = "hpcgpu-rdzv"
_LATE = "hpcgpu-late"
_SETTLE_S = 0.2
# A rank waits so many times as long for the rank that acts for it as nodes wait for each other.
_WAIT_FACTOR = 4
_DOES = {"T": "is stopped", "t": "is held by a debugger", "D": "waits for a disk or a file system"}


class SeenNode(NamedTuple):
    """The ranks of a launch that are seen on one node.

    Attributes
    ----------
    there : tuple of int
        Ranks that are at the rendezvous.
    away : dict
        The state of each other rank's process.

    """

    host: str
    there: tuple[int, ...]
    away: dict[int, str]


class MissingRanks:
    """The end of a rendezvous to which a rank has not come.

    Parameters
    ----------
    facts : RankFacts
        Of this rank.
    environ : mapping of str to str
        This rank's, by which the others of its launch are known.
    host : str
        This node's name.
    folder : Path or None
        A folder of this launch alone, which the nodes may share; None: there is none.
    deadline_s : float
        How long the others have been waited for.
    together_s : float
        The ranks of a launch start, and are late, within so many seconds of each other.

    """

    def __init__(
        self,
        facts: RankFacts,
        environ: Mapping[str, str],
        host: str,
        folder: Path | None,
        deadline_s: float,
        together_s: float = 5.0,
    ) -> None:
        self._facts, self._environ, self._host = facts, environ, host
        self._folder, self._deadline_s, self._together_s = folder, deadline_s, together_s
        self._shown: Path | None = None
        self._in = 0  # the inode of the folder

    def note(self) -> None:
        """Show the other nodes which ranks are there so far: their time may be over before this node's is."""
        there, away = self._look()
        if min(there) == self._facts.rank:
            with contextlib.suppress(OSError, HpcGpuError):
                self._show(self._node(there, away))

    def withdraw(self) -> None:
        """Remove this node's word from the folder: all ranks have come."""
        if self._shown:
            with contextlib.suppress(OSError):  # another node still has its own there, or it is gone
                self._shown.unlink()
                self._shown.parent.rmdir()

    def tell(self) -> None:
        """Say which ranks are missing, once for all nodes that see each other, and end those of this node.

        The first rank of a node whose time is over does it, and the others wait for its end.
        """
        there, away = self._look()
        if acting := self._acting(there):
            pids.wait_for_end(acting.pid, acting.started, _WAIT_FACTOR * self._together_s)
            return
        nodes = self._share(self._node(there, away))
        if not self._is_told() and self._is_first():
            where = os.fspath(self._folder) if self._folder else ""
            log.say(describe(self._facts.size, nodes, self._deadline_s, where, self._environ))
        self._clear(others=len(nodes) > 1)
        for one in (p for found in away.values() for p in found):
            with contextlib.suppress(ProcessLookupError):
                os.kill(one.pid, signal.SIGKILL)

    def _is_told(self) -> bool:
        """Tell whether another node has said it, and removed this node's word."""
        if self._shown is None:
            return False
        try:
            return not self._shown.exists() or self._shown.parent.stat().st_ino != self._in
        except OSError:
            return True

    def _acting(self, there: Mapping[int, pids.Process]) -> pids.Process | None:
        """Return the process of the rank that acts for this node; None: this one does."""
        own = self._facts.rank
        if first := [p for rank, p in there.items() if p.title == _LATE and rank != own]:
            return first[0]
        process.retitle(_LATE)
        time.sleep(_SETTLE_S)  # then those that were late at the same time see each other
        late = {rank: p for rank, p in self._look()[0].items() if p.title == _LATE and rank < own}
        return late[min(late)] if late else None

    def _node(self, there: Mapping[int, pids.Process], away: Mapping[int, list[pids.Process]]) -> SeenNode:
        does = {r: f"process {p.pid} {_DOES.get(p.state, 'has not come so far')}" for r, (p, *_) in away.items()}
        return SeenNode(self._host, tuple(sorted(there)), does)

    def _look(self) -> tuple[dict[int, pids.Process], dict[int, list[pids.Process]]]:
        """Return the processes on this node of the ranks that are at the rendezvous, and of those that are not."""
        found: dict[int, list[pids.Process]] = {}
        for one in pids.own():
            if (rank := self._rank_of(one)) is not None:
                found.setdefault(rank, []).append(one)
        there = {r: p for r, processes in found.items() for p in processes if p.title in (TITLE, _LATE)}
        there.setdefault(self._facts.rank, pids.Process(os.getpid(), 0, 0, "", TITLE, {}))
        return there, {r: processes for r, processes in found.items() if r not in there}

    def _rank_of(self, one: pids.Process) -> int | None:
        try:
            facts = read_rank(one.environ)
        except ValueError:
            return None
        if (facts.launcher, facts.size) != (self._facts.launcher, self._facts.size):
            return None
        launch = read_launch(self._environ)
        alike = read_launch(one.environ) == launch if launch else one.parent == os.getppid()
        return facts.rank if alike else None

    def _share(self, node: SeenNode) -> list[SeenNode]:
        """Return the ranks of all nodes that share the folder."""
        try:
            if self._is_told() or (own := self._show(node)) is None:
                return [node]
            from hpcgpu.host import private

            time.sleep(self._together_s)
            others = [_read(private.read(path)) for path in own.parent.glob("late-*") if path != own]
        except (OSError, HpcGpuError):
            return [node]  # nobody sees more than its own node
        return sorted([node, *others], key=lambda n: n.there)

    def _show(self, node: SeenNode) -> Path | None:
        """Write the ranks of this node where other nodes may look; None: there are none, or no such folder."""
        if self._folder is None or self._facts.local_size == self._facts.size:
            return None
        from hpcgpu.host import private  # brings pathlib, 5 CPU ms

        private.make_folder(self._folder)
        path = self._folder / f"late-{self._host}"
        private.write(path, json.dumps(node))
        self._in = self._in or self._folder.stat().st_ino
        self._shown = path
        return path

    def _is_first(self) -> bool:
        """Tell whether this node is the first to say it."""
        try:
            if self._folder:
                os.close(os.open(self._folder / "said", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            return False
        except OSError:
            return True  # there is no folder
        return True

    def _clear(self, *, others: bool) -> None:
        import shutil

        if others:
            time.sleep(self._together_s)  # they may be that much later, and read what is there
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)


def _read(text: str) -> SeenNode:
    host, there, away = json.loads(text)
    return SeenNode(host, tuple(there), {int(rank): does for rank, does in away.items()})


def describe(
    size: int, nodes: Sequence[SeenNode], deadline_s: float, folder: str, environ: Mapping[str, str] | None = None
) -> str:
    """Return in words which ranks are missing, and which are there.

    Parameters
    ----------
    size : int
        Ranks that the launcher promised.
    nodes : sequence of SeenNode
        Those that are known.
    deadline_s : float
        How long has been waited.
    folder : str
        Where nodes show each other their ranks; empty: nowhere.
    environ : mapping of str to str, optional
        Of a rank, which may name all nodes.

    """
    there = {rank for node in nodes for rank in node.there}
    away = [f"rank {r} on {node.host} ({node.away[r]})" for node in nodes for r in sorted(node.away)]
    unseen = set(range(size)) - there - {rank for node in nodes for rank in node.away}
    began = f"not all {size} ranks came to the rendezvous within {deadline_s:g} s (--death-timeout)"
    here = ", ".join(f"{_ranks(node.there)} on {node.host}" for node in nodes)
    if not away and not unseen:
        return (
            f"all {size} ranks came to the rendezvous, but MPI did not connect them within {deadline_s:g} s "
            f"(--death-timeout): {here}. Let them meet by file: --rendezvous file"
        )
    if not unseen:
        return f"{began}. Missing: {', '.join(away)}. There: {here}"
    missing = ", ".join([*away, f"{_ranks(unseen)} (nothing is seen of {'it' if len(unseen) == 1 else 'them'})"])
    nodelist = (environ or {}).get("SLURM_STEP_NODELIST") or (environ or {}).get("SLURM_JOB_NODELIST")
    listed = f" of {nodelist}" if nodelist else ""
    seen = f"Seen are the nodes{listed} that share {folder}" if folder else "Only this rank's node is seen"
    return f"{began}. Missing: {missing}. There: {here}. {seen}"


def _ranks(ranks: Sequence[int] | set[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {CpuSet(ranks)}"
