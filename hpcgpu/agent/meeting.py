"""The meeting: every rank learns who is where and how to reach the scheduler, once.

MPI is used for one small collective and finalized, so that a rank's early exit is harmless later and the
workers' own MPI is not disturbed.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from hpcgpu.errors import LaunchError, WorldError
from hpcgpu.host import process

if TYPE_CHECKING:
    from pathlib import Path

    from hpcgpu.model import RankFacts

# Fixed width makes it one collective; the largest record is rank 0's: addresses, certificate and key (722 B).
_RECORD_BYTES = 8192
_POLL_S = 0.005
_FILE_POLL_S = 0.05
_LEADER_POLL_S = 0.02
# As long as a leader's imports take from a slow file system; later ones cost CPU, and nothing else.
_LEADER_S = 10.0
# Open MPI 5 as a wheel: btl/ofi sleeps 1 s in MPI_Init; with pml=ob1 MPI_Init costs a sixth of the CPU.
# "btl=self,sm" must not be used: over nodes the first collective fails.
# Where ptrace is forbidden, as in most containers, copies from one process to another (cma) fail with a line of
# "Read -1, expected 8192" each in the job's log (4.1.4; 5 calls the same thing smsc) before another way is taken.
_QUICK_OPEN_MPI = {
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_mtl": "^ofi",
    "OMPI_MCA_btl": "^ofi,uct",
    "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
    "OMPI_MCA_smsc": "^cma",
}


def meet_by_mpi(
    own: Callable[[], Mapping[str, Any]], facts: RankFacts, deadline_s: float, launch: str = ""
) -> list[dict[str, Any]]:
    """Return the records of all ranks, in rank order.

    Parameters
    ----------
    own : callable
        Returns this rank's record, JSON of at most 8 KiB; called when MPI is up, so that rank 0's
        scheduler starts meanwhile.
    facts : RankFacts
        What the launcher promised; the MPI world is checked against it.
    deadline_s : float
        How long to wait for the other ranks, in seconds.
    launch : str
        What only this launch has, where the rank whose ``local_rank`` is 0 comes later than others of its node.

    Raises
    ------
    LaunchError
        mpi4py or an MPI library is missing, the world has the wrong size, or somebody did not come.

    """
    # MPI_Init waits for all ranks, without end, in C: only another thread can end that.
    late = threading.Timer(deadline_s, _end_late, (facts, deadline_s))
    late.daemon = True
    late.start()
    try:
        with leader_first(launch, facts.local_rank):
            mpi = _load_mpi()
            try:
                _check_world(mpi, facts)
                return _gather(mpi, own())
            finally:
                mpi.Finalize()
    finally:
        late.cancel()


@contextlib.contextmanager
def leader_first(launch: str, local_rank: int | None) -> Iterator[None]:
    """Let the ranks of a node begin a thing when their leader does, which has had its imports to do.

    MPI_Init asks 10,000 times a second for whoever is missing: 0.12 CPU s of each rank while its leader imports for
    2 s (Open MPI 4.1.4), on the cores that the leader needs. Nothing depends on it: who does not see its leader, in
    another network namespace, goes after 10 s.

    Parameters
    ----------
    launch : str
        Names the leader's sign, an abstract unix socket; empty: nobody waits.
    local_rank : int or None
        0: this is the leader.

    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sign:
        name = f"\0hpcgpu-{os.getuid()}-{launch[-64:]}"
        if launch and local_rank == 0:
            with contextlib.suppress(OSError):
                sign.bind(name)
        elif launch:
            end = time.monotonic() + _LEADER_S
            while sign.connect_ex(name) and time.monotonic() < end:
                time.sleep(_LEADER_POLL_S)
        yield


def _end_late(facts: RankFacts, deadline_s: float) -> None:
    text = f"not all {facts.size} ranks came to the meeting within {deadline_s:g} s (--death-timeout)"
    os.write(2, f"hpcgpu: rank {facts.rank}: {text}\n".encode())
    os._exit(1)


def _load_mpi() -> Any:  # noqa: ANN401 - mpi4py has no stubs we follow
    quick = {k: v for k, v in _QUICK_OPEN_MPI.items() if k not in os.environ}
    os.environ.update(quick)
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = False
        with process.importing():
            from mpi4py import MPI

        MPI.Init_thread(MPI.THREAD_SINGLE)
    except (ImportError, RuntimeError) as e:
        raise LaunchError(
            f"no MPI library could be loaded: {e}. Load the site's MPI module, or install one: "
            "pip install 'hpcgpu[mpi-runtime]'; or let the ranks meet by file: --rendezvous file"
        ) from e
    finally:
        # neither the workers nor the user's own MPI shall inherit what is right for this one collective
        for name in quick:
            os.environ.pop(name, None)
    return MPI


def _check_world(mpi: Any, facts: RankFacts) -> None:  # noqa: ANN401
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


def _gather(mpi: Any, own: Mapping[str, Any]) -> list[dict[str, Any]]:  # noqa: ANN401
    data = json.dumps(own).encode()
    if len(data) > _RECORD_BYTES:
        raise LaunchError(f"the meeting's record of rank {own.get('rank')} has {len(data)} bytes, over {_RECORD_BYTES}")
    world = mpi.COMM_WORLD
    received = bytearray(_RECORD_BYTES * world.Get_size())
    request = world.Iallgather(bytearray(data.ljust(_RECORD_BYTES)), received)
    # A blocking collective spins: it doubles the start-up cost of everybody who shares the node's cores.
    while not request.Test():
        time.sleep(_POLL_S)
    return [json.loads(received[i : i + _RECORD_BYTES]) for i in range(0, len(received), _RECORD_BYTES)]


def meet_by_files(own: Mapping[str, Any], facts: RankFacts, folder: Path, deadline_s: float) -> list[dict[str, Any]]:
    """Return the records of all ranks, in rank order, by files on a shared file system.

    Each rank writes its record, rank 0 gathers them into one file: two reads per rank, however many there are.

    Parameters
    ----------
    own : mapping
        This rank's record.
    facts : RankFacts
        What the launcher promised: the number of files that rank 0 waits for.
    folder : Path
        Of this run alone, on a file system that all ranks share; made with mode 0700, its files with 0600.
    deadline_s : float
        How long to wait for the other ranks, in seconds.

    Raises
    ------
    LaunchError
        Somebody did not come.

    """
    from hpcgpu.host import private

    private.make_folder(folder)
    end = time.monotonic() + deadline_s
    private.write(folder / f"rank-{facts.rank}", json.dumps(own))
    world = folder / "world"
    if facts.rank == 0:
        names = [folder / f"rank-{i}" for i in range(facts.size)]
        _wait(lambda: all(n.exists() for n in names), end, folder, deadline_s)
        private.write(world, json.dumps([json.loads(private.read(n)) for n in names]))
    _wait(world.exists, end, folder, deadline_s)
    records: list[dict[str, Any]] = json.loads(private.read(world))
    return records


def _wait(done: Callable[[], bool], end: float, folder: Path, deadline_s: float) -> None:
    while not done():
        if time.monotonic() > end:
            there = sorted(p.name for p in folder.glob("rank-*"))
            raise LaunchError(
                f"not all ranks came to the meeting within {deadline_s:g} s; in {folder} there are: "
                f"{', '.join(there)}. Is this folder on a file system that all nodes share?"
            )
        time.sleep(_FILE_POLL_S)
