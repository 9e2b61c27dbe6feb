"""The binding of one worker process (:class:`Binding`), and everything that it starts with (:class:`WorkerSpec`)."""

from __future__ import annotations

from dataclasses import dataclass, field

from hpcgpu.model.cpuset import CpuSet
from hpcgpu.model.topology import Gpu, Nic


@dataclass(frozen=True, slots=True)
class Binding:
    """Cores, memory, GPUs and NICs of one worker, before CUDA starts.

    Attributes
    ----------
    gpus : tuple of Gpu
        All whole GPUs that are visible, the worker's own first; none for a worker without a GPU.
    memory_policy : str
        ``preferred-many``, ``bind``, ``interleave`` or ``none``.
    memory_nodes : CpuSet
        NUMA nodes of the policy.
    shared_cores : bool
        True if other workers of the node have the same cores (fewer cores than workers).
    reasons : tuple of str
        Reasons in words, for ``explain()``.

    """

    cpuset: CpuSet
    gpus: tuple[Gpu, ...]
    nics: tuple[Nic, ...] = ()
    memory_policy: str = "none"
    memory_nodes: CpuSet = field(default_factory=CpuSet)
    interface: str = ""
    shared_cores: bool = False
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ActualBinding:
    """The binding of a running process, read back from the kernel.

    Attributes
    ----------
    threads : tuple of (int, CpuSet)
        Thread id and mask of every thread.
    memory_policy : str
        As in :class:`Binding`, or ``preferred``; ``none`` is the kernel's default, empty is unknown.
    env : tuple of (str, str)
        The requested variables that are set.

    """

    threads: tuple[tuple[int, CpuSet], ...]
    memory_policy: str = ""
    memory_nodes: CpuSet = field(default_factory=CpuSet)
    env: tuple[tuple[str, str], ...] = ()

    @property
    def cpuset(self) -> CpuSet:
        """PUs that any of the threads may run on."""
        return CpuSet(frozenset().union(*(mask for _, mask in self.threads)))


@dataclass(frozen=True, slots=True)
class Rapids:
    """The parts of RMM and cuDF that a worker sets up before user code runs.

    Attributes
    ----------
    resources : tuple of (str, tuple of (str, int or str))
        Classes of ``rmm.mr`` and their arguments; each wraps the one before, the last one allocates.
    libraries : tuple of str
        ``cupy``, ``torch``: libraries that allocate through RMM.
    needs : tuple of (str, str)
        Modules that must be installed, and the options that need them.

    """

    resources: tuple[tuple[str, tuple[tuple[str, int | str], ...]], ...] = ()
    libraries: tuple[str, ...] = ()
    needs: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """One worker: its name, its binding, its limits and its environment."""

    name: str
    binding: Binding
    nthreads: int = 1
    memory_limit_bytes: int | None = None
    device_memory_limit_bytes: int = 0
    device_memory_bytes: int = 0
    simulated: bool = False
    jit_unspill: bool = False
    rapids: Rapids | None = None
    local_directory: str = ""
    env: tuple[tuple[str, str], ...] = ()
    kept_env: tuple[str, ...] = ()
    resources: tuple[tuple[str, float], ...] = ()

    @property
    def gpu(self) -> Gpu | None:
        """The worker's own GPU; None for one of ``cpu_workers``."""
        return self.binding.gpus[0] if self.binding.gpus else None
