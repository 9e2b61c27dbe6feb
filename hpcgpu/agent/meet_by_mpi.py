"""The rendezvous by MPI: each rank learns once where every rank and the scheduler is.

MPI is used for one small collective and finalized, so that a rank's early exit is harmless later and the workers' MPI
is not disturbed.

MPI_Init asks 10,000 times a second for a missing rank: 0.12 CPU s of each rank while its leader imports for 2 s (Open
MPI 4.1.4), on the cores that the leader needs. So the other ranks wait for it first; nothing depends on that wait: a
rank that does not see its leader, in another PID namespace, goes on after 1 s.

btl/tcp knows its peers by a number that is made of the job's, and by their address: a user of one of the nodes could
play a rank, and rank 0's record has the cluster's key. So records are sealed.
"""

from __future__ import annotations

import ctypes
import json
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from hpcgpu.agent import mpi_library
from hpcgpu.agent.missing_ranks import TITLE
from hpcgpu.errors import LaunchError, WorldError
from hpcgpu.host import process
from hpcgpu.launch.environment import read_launch, read_rank
from hpcgpu.model import RankFacts

# Fixed width makes it one collective; the largest record is rank 0's: addresses, certificate and key (722 B).
_RECORD_BYTES, _MAC_BYTES = 8192, 64
_POLL_S = 0.005
_LEADER_POLL_S = 0.02
# A leader's imports from a slow file system take this long; a later leader costs CPU only.
_LEADER_S = 10.0
_UNSEEN_S = 1.0
_LOOK_S = 0.5
# A leader started by the launcher itself is at the rendezvous by then, as a rule. The search among all processes
# of the user takes 10 CPU ms and more, in each rank.
_SIBLING_S = 3.0


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
    end = time.monotonic() + _LEADER_S
    # The launcher has started it, as this rank, a moment earlier or later: so its list of children begins with it.
    first = next((p.pid for p in process.children(os.getppid()) if _leads(p, launch)), None)
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
