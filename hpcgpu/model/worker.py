"""The plan of one worker, and what a running one has.

Not with the topology: making these classes takes 2 CPU ms, which a rank of ``hpcgpu bind`` need not spend.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hpcgpu.model.allocation import CpuSet
from hpcgpu.model.topology import Binding, Gpu


@dataclass(frozen=True, slots=True)
class ActualBinding:
    """The binding of a running process, read back from the kernel."""

    threads: tuple[tuple[int, CpuSet], ...]  # id and mask of every thread
    memory_policy: str = ""  # as in Binding, or preferred; none: the kernel's default; empty: unknown
    memory_nodes: CpuSet = field(default_factory=CpuSet)
    env: tuple[tuple[str, str], ...] = ()  # the requested variables that are set

    @property
    def cpuset(self) -> CpuSet:
        """PUs that any of the threads may run on."""
        return CpuSet(frozenset().union(*(mask for _, mask in self.threads)))


@dataclass(frozen=True, slots=True)
class Rapids:
    """The parts of RMM and cuDF that a worker sets up before user code runs."""

    # classes of rmm.mr with arguments; each wraps the one before, the last allocates
    resources: tuple[tuple[str, tuple[tuple[str, int | str], ...]], ...] = ()
    libraries: tuple[str, ...] = ()  # cupy, torch: allocate through RMM
    needs: tuple[tuple[str, str], ...] = ()  # modules that must be installed, and the options that need them


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """The plan of one worker: its name, binding, limits and environment."""

    name: str
    binding: Binding
    nthreads: int = 1
    memory_limit_bytes: int | None = None
    device_memory_limit_bytes: int = 0
    device_memory_bytes: int = 0
    simulated: bool = False
    jit_unspill: bool = False
    node_copies: bool = True
    rapids: Rapids | None = None
    local_directory: str = ""
    env: tuple[tuple[str, str], ...] = ()
    kept_env: tuple[str, ...] = ()
    gpu_memory_nodes: CpuSet = field(default_factory=CpuSet)  # NUMA nodes of the machine that are no host memory
    resources: tuple[tuple[str, float], ...] = ()

    @property
    def gpu(self) -> Gpu | None:
        """The worker's first GPU; None for one of ``cpu_workers``."""
        return self.binding.gpus[0] if self.binding.gpus else None
