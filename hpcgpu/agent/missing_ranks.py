"""Ranks that miss a rendezvous by MPI: the report about them, once for all nodes, and their end.

Every rank imports this module. So functions import the modules that bring pathlib, which takes 5 CPU ms.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from hpcgpu.errors import HpcGpuError, LaunchError
from hpcgpu.host import log, process
from hpcgpu.launch.environment import read_launch, read_rank
from hpcgpu.model import CpuSet, RankFacts

if TYPE_CHECKING:
    from pathlib import Path


# A rank's title while it waits for the others; 15 characters are kept.
TITLE = "hpcgpu-rdzv"
_LATE = "hpcgpu-late"
_SETTLE_S = 0.2
# A rank waits this many times as long for the rank that acts for it as nodes wait for each other.
_WAIT_FACTOR = 4
_DOES = {"T": "is stopped", "t": "is held by a debugger", "D": "waits for a disk or a file system"}
# After the deadline a rank reports the missing ranks, with other nodes' ranks, and cleans up.
_STUCK_S = 40.0


class NodeRanks(NamedTuple):
    """The ranks of a launch on one node, as its processes show them."""

    host: str
    present: tuple[int, ...]  # ranks at the rendezvous
    absent: dict[int, str]  # the state of each other rank's process


class MissingRanks:
    """The end of a rendezvous that a rank has missed.

    ``environ`` identifies this launch's ranks. ``folder`` finds one of this launch alone, which nodes may share. The
    ranks of a launch start, and are late, within ``together_s`` of each other; they were waited for ``deadline_s``.
    """

    def __init__(
        self,
        facts: RankFacts,
        environ: Mapping[str, str],
        host: str,
        folder: Callable[[], Path],
        deadline_s: float,
        together_s: float = 5.0,
    ) -> None:
        self._facts, self._environ, self._host = facts, environ, host
        self._find_folder, self._deadline_s, self._together_s = folder, deadline_s, together_s
        self._shown: Path | None = None
        self._in = 0  # the inode of the folder

    @functools.cached_property
    def _folder(self) -> Path | None:
        with contextlib.suppress(LaunchError):
            return self._find_folder()
        return None

    def note(self) -> None:
        """Show the other nodes the ranks that are here so far: their deadline may be earlier than this node's."""
        present, absent = self._look()
        if min(present) == self._facts.rank:
            with contextlib.suppress(OSError, HpcGpuError):
                self._show(self._node(present, absent))

    @contextlib.contextmanager
    def watched(self, close: Callable[[], object]) -> Iterator[None]:
        """Watch the time of a block in which this thread is in MPI: after it report, ``close``, and end the process."""
        end = threading.Timer(self._deadline_s, self._end, (close,))
        timers = threading.Timer(self._deadline_s / 2, self.note), end
        for timer in timers:
            timer.daemon = True
            timer.start()
        # ends the process from C if no other thread can run then
        faulthandler.dump_traceback_later(self._deadline_s + _STUCK_S, exit=True, file=2)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
            for timer in timers:
                timer.cancel()
        if self._shown:  # and all ranks have come
            with contextlib.suppress(OSError):  # another node's file is in the folder, or the folder is gone
                self._shown.unlink()
                self._shown.parent.rmdir()

    def _end(self, close: Callable[[], object]) -> None:
        try:
            self.report()
            close()
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(1)

    def report(self) -> None:
        """Report the missing ranks, once for all nodes that see each other, and kill those of this node."""
        present, absent = self._look()
        if acting := self._acting(present):
            process.wait_for_end(acting.pid, acting.started, _WAIT_FACTOR * self._together_s)
            return  # the first rank of this node whose deadline has passed reports for all
        node = self._node(present, absent)
        try:
            nodes = self._share(node)
        except (OSError, HpcGpuError):
            nodes = [] if self._is_reported() else [node]  # each node sees only itself
        if nodes:
            where = os.fspath(self._folder) if self._folder else ""
            log.say(describe(self._facts.size, nodes, self._deadline_s, where, self._environ))
        if len(nodes) > 1:
            time.sleep(self._together_s)  # other nodes may be that much later, and read the files
        if self._folder:
            import shutil

            shutil.rmtree(self._folder, ignore_errors=True)
        for proc in (p for ranks in absent.values() for p in ranks):
            with contextlib.suppress(ProcessLookupError):
                os.kill(proc.pid, signal.SIGKILL)

    def _is_reported(self) -> bool:
        """Return True if another node has reported, and removed this node's file."""
        if self._shown is None:
            return False
        try:
            return not self._shown.exists() or self._shown.parent.stat().st_ino != self._in
        except OSError:
            return True

    def _acting(self, present: Mapping[int, process.Process]) -> process.Process | None:
        """Return the process of the rank that acts for this node; None: this one does."""
        rank_here = self._facts.rank  # of this process
        if first := [p for rank, p in present.items() if p.title == _LATE and rank != rank_here]:
            return first[0]
        process.set_title(_LATE)
        time.sleep(_SETTLE_S)  # ranks that are late at the same time see each other then
        late = {rank: p for rank, p in self._look()[0].items() if p.title == _LATE and rank < rank_here}
        return late[min(late)] if late else None

    def _node(self, present: Mapping[int, process.Process], absent: Mapping[int, list[process.Process]]) -> NodeRanks:
        does = {r: f"process {p.pid} {_DOES.get(p.state, 'has not come so far')}" for r, (p, *_) in absent.items()}
        return NodeRanks(self._host, tuple(sorted(present)), does)

    def _look(self) -> tuple[dict[int, process.Process], dict[int, list[process.Process]]]:
        """Return this node's processes of the ranks at the rendezvous, and of the other ranks."""
        ranks: dict[int, list[process.Process]] = {}
        for proc in process.user_processes():
            if (rank := self._rank_of(proc)) is not None:
                ranks.setdefault(rank, []).append(proc)
        present = {r: p for r, processes in ranks.items() for p in processes if p.title in (TITLE, _LATE)}
        present.setdefault(self._facts.rank, process.Process(os.getpid(), 0, 0, "", TITLE, {}))
        return present, {r: processes for r, processes in ranks.items() if r not in present}

    def _rank_of(self, proc: process.Process) -> int | None:
        try:
            facts = read_rank(proc.environ)
        except ValueError:
            return None
        if (facts.launcher, facts.size) != (self._facts.launcher, self._facts.size):
            return None
        launch = read_launch(self._environ)
        alike = read_launch(proc.environ) == launch if launch else proc.parent == os.getppid()
        return facts.rank if alike else None

    def _share(self, node: NodeRanks) -> list[NodeRanks]:
        """Return the ranks of all nodes that share the folder; none if another node reports them."""
        from hpcgpu.host import private

        if self._is_reported():
            return []
        if not self._show(node):
            return [node]
        assert self._shown
        time.sleep(self._together_s)
        others = [json.loads(private.read(o)) for o in self._shown.parent.glob("late-*") if o != self._shown]
        if self._is_reported():
            return []
        try:
            os.close(os.open(self._shown.parent / "said", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            time.sleep(self._together_s)  # a launcher may end all ranks with this one
            return []
        seen = [NodeRanks(host, tuple(came), {int(r): does for r, does in away.items()}) for host, came, away in others]
        return sorted([node, *seen], key=lambda n: n.present)

    def _show(self, node: NodeRanks) -> bool:
        """Write this node's ranks for the other nodes; return False without other nodes or a folder."""
        if self._folder is None or self._facts.local_size == self._facts.size:
            return False
        from hpcgpu.host import private  # brings pathlib, 5 CPU ms

        private.make_folder(self._folder)
        self._shown = self._folder / f"late-{self._host}"
        private.write(self._shown, json.dumps(node))
        self._in = self._in or self._folder.stat().st_ino
        return True


def describe(
    size: int, nodes: Sequence[NodeRanks], deadline_s: float, folder: str, environ: Mapping[str, str] | None = None
) -> str:
    """Describe the ranks that are missing and those that came, of ``size`` promised ones, after ``deadline_s``.

    ``folder`` is where nodes show each other their ranks ("": nowhere); ``environ`` is a rank's, which may name all
    nodes.
    """
    present = {rank for node in nodes for rank in node.present}
    absent = [f"rank {r} on {node.host} ({node.absent[r]})" for node in nodes for r in sorted(node.absent)]
    unseen = set(range(size)) - present - {rank for node in nodes for rank in node.absent}
    began = f"not all {size} ranks came to the rendezvous within {deadline_s:g} s (--death-timeout)"
    here = ", ".join(f"{format_ranks(node.present)} on {node.host}" for node in nodes)
    if not absent and not unseen:
        return (
            f"all {size} ranks came to the rendezvous, but MPI did not connect them within {deadline_s:g} s "
            f"(--death-timeout): {here}. Let them meet by file: --rendezvous file"
        )
    if not unseen:
        return f"{began}. Missing: {', '.join(absent)}. There: {here}"
    missing = ", ".join([*absent, f"{format_ranks(unseen)} (no process is seen)"])
    nodelist = (environ or {}).get("SLURM_STEP_NODELIST") or (environ or {}).get("SLURM_JOB_NODELIST")
    listed = f" of {nodelist}" if nodelist else ""
    seen = f"Seen are the nodes{listed} that share {folder}" if folder else "Only this rank's node is seen"
    return f"{began}. Missing: {missing}. There: {here}. {seen}"


def format_ranks(ranks: Collection[int]) -> str:
    """Return ranks for people: ``ranks 0-2``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {CpuSet(ranks)}"
