"""The limits of this process and its user: open files, processes, ports."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from hpcgpu.host.host_memory import cgroups
from hpcgpu.host.kernel_binding import text_of
from hpcgpu.model.allocation import Limits

_PROC = Path("/proc")
_PORTS = "sys/net/ipv4/ip_local_port_range"


def read(proc: Path = _PROC) -> Limits:
    """Read the limits; the hard one of open files, the soft one of processes, which nothing raises."""
    # Linux's RLIM_INFINITY is -1. The kernel does not hold root to its number of processes (fork(2)).
    processes = resource.getrlimit(resource.RLIMIT_NPROC)[0] if os.geteuid() else -1
    of_job = [text_of(folder / "pids.max").strip() for _, folder in cgroups(proc, "pids")]
    first, _, last = text_of(proc / _PORTS).partition("\t")
    return Limits(
        files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        processes=processes,
        locked_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        job_processes=min((int(text) for text in of_job if text.isdigit()), default=-1),
        ports=int(last) - int(first) + 1 if last else -1,
    )
