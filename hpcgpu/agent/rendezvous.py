"""The rendezvous: each rank learns once where every rank and the scheduler is; by MPI or by files.

By MPI: MPI is used for one small collective and finalized, so that a rank's early exit is harmless later and the
workers' MPI is not disturbed.

Every rank imports this module. So functions import the modules that bring pathlib, which takes 5 CPU ms.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from hpcgpu.agent import mpi_library
from hpcgpu.errors import HpcGpuError, LaunchError, WorldError
from hpcgpu.host import log, process
from hpcgpu.launch.environment import read_launch, read_rank
from hpcgpu.model import CpuSet, RankFacts

if TYPE_CHECKING:
    from pathlib import Path

    from hpcgpu.model.allocation import BootstrapSettings


# A rank's title while it waits for the others; 15 characters are kept.
TITLE = "hpcgpu-rdzv"
_LATE = "hpcgpu-late"
_SETTLE_S = 0.2
# A rank waits this many times as long for the rank that acts for it as nodes wait for each other.
_WAIT_FACTOR = 4
_DOES = {"T": "is stopped", "t": "is held by a debugger", "D": "waits for a disk or a file system"}


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
        # If no other thread can run then, faulthandler ends the process from C.
        end = threading.Timer(self._deadline_s, self._end, (close,))
        timers = threading.Timer(self._deadline_s / 2, self.note), end
        for timer in timers:
            timer.daemon = True
            timer.start()
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
        # The first rank of a node whose deadline passes does it; the others wait for its end.
        present, absent = self._look()
        if acting := self._acting(present):
            process.wait_for_end(acting.pid, acting.started, _WAIT_FACTOR * self._together_s)
            return
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
    """Describe the ranks that are missing and those that came, of ``size`` promised ones, after ``deadline_s``."""
    # folder is where nodes show each other their ranks ("": nowhere); environ is a rank's, which may name all nodes.
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


# Fixed width makes it one collective; the largest record is rank 0's: addresses, certificate and key (722 B).
_RECORD_BYTES, _MAC_BYTES = 8192, 64
_NAMES = 16  # characters of a launch that name its folder; messages show them, the others are a secret
_POLL_S = 0.005
_LEADER_POLL_S = 0.02
# A leader's imports from a slow file system take this long; a later leader costs CPU only.
_LEADER_S = 10.0
_UNSEEN_S = 1.0
_LOOK_S = 0.5
# A leader started by the launcher itself is at the rendezvous by then, as a rule. The search among all processes
# of the user takes 10 CPU ms and more, in each rank.
_SIBLING_S = 3.0
# After the deadline a rank reports the missing ranks, with other nodes' ranks, and cleans up.
_STUCK_S = 40.0


def meet_by_mpi(
    record: Callable[[], Mapping[str, Any]], facts: RankFacts, launch: str = "", key: str = ""
) -> list[dict[str, Any]]:
    """Return the records of all ranks, in rank order; raise LaunchError without MPI or with a world of another size.

    ``record`` returns this rank's record, JSON of at most 8 KiB; it is called when MPI is up, so that rank 0's
    scheduler starts meanwhile. ``launch`` is a word that only this launch's environment holds, by which the other
    ranks of a node wait for local rank 0; "": they do not. The MPI world is checked against the launcher's ``facts``.
    With ``key``, a secret of this launch, the records are secret, and WorldError for a record of anybody else.
    """
    with mpi_library.options():
        mpi = mpi_library.load()  # before a rank waits for its leader
        with process.titled(TITLE):
            if launch and facts.local_rank:
                wait_for_leader(launch)
            # MPI waits in C for all ranks without end; mpi4py's own call keeps the GIL (4.1.2)
            provided = ctypes.c_int()
            code = ctypes.CDLL(mpi.__file__).MPI_Init_thread(None, None, mpi.THREAD_SINGLE, ctypes.byref(provided))
            if code:
                raise LaunchError(f"MPI_Init_thread returned {code}")
            mpi.COMM_WORLD.Set_errhandler(mpi.ERRORS_RETURN)  # as mpi4py's own call does: exceptions of errors
            try:
                _check_world(mpi, facts)
                return _gather(mpi, record(), key)
            finally:
                mpi.Finalize()


def wait_for_leader(launch: str) -> None:
    """Wait until this node's leader begins MPI, after its imports; ``launch`` is in this launch's environments only."""
    # MPI_Init asks 10,000 times a second for a missing rank: 0.12 CPU s of each rank while its leader imports for 2 s
    # (Open MPI 4.1.4), on the cores that the leader needs. Nothing depends on the wait: a rank that does not see its
    # leader, in another PID namespace, goes on after 1 s.
    end = time.monotonic() + _LEADER_S
    # The launcher has started it, as this rank, a moment earlier or later: so its list of children begins with it.
    first = next((p.pid for p in process.siblings() if _leads(p, launch)), None)
    leaders = [first] if first else []
    unseen_s, look_s = time.monotonic() + _UNSEEN_S, time.monotonic() + (_SIBLING_S if first else 0.0)
    while (now := time.monotonic()) < end and (leaders or now < unseen_s):
        if now >= look_s:  # a shell may stand before it, so it may be another process by now
            look_s, leaders = now + _LOOK_S, [p.pid for p in process.user_processes() if _leads(p, launch)]
        if any(process.title(pid) == TITLE for pid in leaders):
            return
        time.sleep(_LEADER_POLL_S)


def _leads(other: process.Process, launch: str) -> bool:
    environ = other.environ
    try:
        return read_launch(environ) == launch and read_rank(environ).local_rank == 0
    except ValueError:
        return False


def _check_world(mpi: Any, facts: RankFacts) -> None:
    size = mpi.COMM_WORLD.Get_size()
    if size == facts.size:
        return
    library = mpi.Get_library_version().split(",")[0].strip("\x00 \n")
    advice = "srun --mpi=list shows what this Slurm can do; " if facts.launcher == "srun" else ""
    kind = f" (--mpi={facts.mpi_type})" if facts.mpi_type else ""
    raise WorldError(
        f"{facts.launcher}{kind} started {facts.size} ranks, but MPI ({library}) sees a world of {size}: "
        f"launcher and library do not belong together. {advice}"
        "use the mpirun of that library, or let the ranks meet by file: --rendezvous file"
    )


def sealed(data: bytes, rank: int, key: str) -> bytes:
    """Return the one record of a rank as a fixed number of bytes: a MAC, and what only the key of its launch reads."""
    # btl/tcp knows its peers by a number that is made of the job's, and by their address: a user of one of the nodes
    # could play a rank, and rank 0's record has the cluster's key.
    import hashlib  # 3 ms

    stream = hashlib.shake_256(f"{key} {rank}".encode()).digest(_RECORD_BYTES)
    secret = _xor(data.ljust(_RECORD_BYTES), stream)
    return hashlib.blake2b(b"%d %b" % (rank, secret), key=key.encode()).digest() + secret


def opened(text: bytes, rank: int, key: str) -> bytes:
    """Return a rank's record; raise WorldError if it was not made with the key of this launch."""
    import hashlib

    data = _xor(text[_MAC_BYTES:], hashlib.shake_256(f"{key} {rank}".encode()).digest(_RECORD_BYTES))
    if sealed(data, rank, key) != text:
        raise WorldError(
            f"the record of rank {rank} is not of this launch: another process took part in the rendezvous by MPI. Let "
            "the ranks meet by file: --rendezvous file"
        )
    return data


def _xor(one: bytes, other: bytes) -> bytes:
    return (int.from_bytes(one, "big") ^ int.from_bytes(other, "big")).to_bytes(_RECORD_BYTES, "big")


def _gather(mpi: Any, record: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    data = json.dumps(record).encode()
    if len(data) > _RECORD_BYTES:
        raise LaunchError(f"the record of rank {record.get('rank')} has {len(data)} bytes, over {_RECORD_BYTES}")
    world, size = mpi.COMM_WORLD, _RECORD_BYTES + _MAC_BYTES
    received = bytearray(size * world.Get_size())
    request = world.Iallgather(bytearray(sealed(data, world.Get_rank(), key)), received)
    # A blocking collective spins: it doubles the start-up cost of all processes that share the node's cores.
    while not request.Test():
        time.sleep(_POLL_S)
    parts = enumerate(range(0, len(received), size))
    return [json.loads(opened(bytes(received[i : i + size]), rank, key)) for rank, i in parts]


def key_of(bootstrap: BootstrapSettings) -> str:
    """Return the secret of this launch, "" if the ranks were started by the user's own launcher."""
    return bootstrap.launch[_NAMES:]


def folder_of(bootstrap: BootstrapSettings, environ: Mapping[str, str]) -> Path:
    """Return the folder of this run's rendezvous: the document's, or one of this launch alone; or raise LaunchError."""
    from pathlib import Path

    from hpcgpu.host.private import user_folder

    if bootstrap.launch and bootstrap.folder and bootstrap.shape != "member":  # that is the whole cluster's
        return Path(bootstrap.folder) / f"ranks-{bootstrap.launch[:_NAMES]}"
    if not (launch := bootstrap.launch[:_NAMES] or read_launch(environ)):
        raise LaunchError(
            "rendezvous='file' needs 'hpcgpu launch', srun, or the mpirun of Open MPI or PALS: "
            "nothing tells this launch from another"
        )
    return user_folder("rendezvous") / launch
