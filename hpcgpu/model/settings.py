"""Every option, declared once: name, default, kind of value, and what it means.

``config`` reads values by ``kind``, the classes and the command line take their options from here.
The name users type is the field's name, or ``user_name`` where the field carries a unit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from types import MappingProxyType
from typing import Any

from hpcgpu.model.limit import DEVICE, NO_LIMIT, SHARE, Limit

# Options that set up RMM and cuDF, with dask-cuda's names.
RMM = (
    "rmm_pool_size",
    "rmm_maximum_pool_size",
    "rmm_managed_memory",
    "rmm_async",
    "rmm_release_threshold",
    "rmm_allocator_external_lib_list",
    "rmm_log_directory",
    "rmm_track_allocations",
)
CUDF = ("enable_cudf_spill", "cudf_spill_stats")
# Options that are about a worker, not about ranks and jobs, beyond those that Dask's own workers have.
WORKER = (
    *(
        "gpus",
        "simulate",
        "workers_per_gpu",
        "cores",
        "reserved_cores",
        "memory_policy",
        "nics",
        "env",
        "trust_local_directory",
    ),
    *("device_memory_limit", "jit_unspill", *RMM, *CUDF),
)
# Those that Dask's own workers have, too.
DASK_WORKER = ("nthreads", "memory_limit", "local_directory", "interface", "protocol", "resources", "death_timeout")

# Headings of help and reference, and the options below each, by the names users type.
GROUPS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "Size": ("site", "nodes", "gpus_per_node", "gpus", "simulate", "workers_per_gpu", "cpu_workers", "nthreads"),
        "Batch job": (
            *("queue", "account", "walltime", "cores_per_gpu", "memory", "job_name", "log_directory", "site_limits"),
            *("job_extra_directives", "job_directives_skip", "job_script_prologue"),
        ),
        "Life": ("shape", "scheduler", "drain", "client_grace", "death_timeout"),
        "Memory": ("device_memory_limit", "memory_limit", "jit_unspill", "local_directory", "trust_local_directory"),
        "Binding": ("cores", "reserved_cores", "memory_policy", "nics", "respect_launcher"),
        "Network": (
            *("protocol", "security", "node_copies", "interface"),
            *("scheduler_port", "dashboard", "dashboard_port"),
        ),
        "Start": ("ranks", "launcher", "rendezvous", "python", "progress"),
        "Workers": ("resources", "env", "allocator"),
        "RMM and cuDF": (*RMM, *CUDF),
    }
)


def option(
    default: Any,  # the field's own annotation says the type
    kind: str,
    text: str,
    *,
    user_name: str = "",
    choices: tuple[str, ...] = (),
    aliases: tuple[str, ...] = (),
    example: str = "",
) -> Any:
    """Return a dataclass field; ``aliases`` are the same option's names in dask-jobqueue and dask-cuda."""
    metadata = {
        "kind": kind,
        "text": text,
        "user_name": user_name,
        "choices": choices,
        "aliases": aliases,
        "example": example,
    }
    if isinstance(default, Mapping):  # read-only, but Python 3.11 takes every unhashable default for a mutable one
        return field(default_factory=lambda: default, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The values of one run, and the source of each that is not a default."""

    nodes: int = option(1, "count", "nodes of the job")
    gpus_per_node: int | None = option(None, "count", "GPUs (and workers) on each node; all that are granted if unset")
    gpus: str | None = option(
        None,
        "gpus",
        "GPUs of the whole job, at a known site or with gpus_per_node or simulate; or 'sim:4', 'sim:4x256MiB': the "
        "short form of simulate",
    )
    simulate: str | None = option(
        None, "simulate", "simulated GPUs of each node: '4', or '4x256MiB' with the memory of each"
    )
    ranks: str = option("gpu", "choice", "one MPI rank per GPU, or one per node", choices=("gpu", "node"))
    shape: str = option(
        "gang",
        "choice",
        "one job of fixed size, or a first job with the scheduler and one-node jobs that come and go (scale, adapt)",
        choices=("gang", "elastic"),
    )
    scheduler: str = option(
        "job",
        "choice",
        "where an elastic cluster has its scheduler: in its first job, or on this machine beside this process",
        choices=("job", "here"),
    )
    cpu_workers: int = option(0, "number", "workers without a GPU on each node, beside those of the GPUs")
    drain_s: float = option(
        120.0, "seconds", "how long before a job's time limit its workers hand their data to others", user_name="drain"
    )
    nthreads: int = option(1, "count", "threads of a worker", aliases=("threads_per_worker",))
    cores_per_gpu: int | None = option(None, "count", "cores asked of the batch system for each GPU")
    memory_bytes: int | None = option(None, "bytes", "memory asked for on each node", user_name="memory")
    queue: str | None = option(None, "text", "queue or partition", aliases=("partition",))
    account: str | None = option(None, "text", "account or project that is charged", aliases=("project",))
    walltime_s: int | None = option(
        None, "duration", "time limit of the job", user_name="walltime", example="'02:00:00' or '2h'"
    )
    job_name: str = option("hpcgpu", "text", "name of the job", aliases=("name",))
    job_extra_directives: tuple[str, ...] = option(
        (), "texts", "options for the batch system, such as '--constraint=a100'"
    )
    job_directives_skip: tuple[str, ...] = option((), "texts", "options to leave out, such as '--mem'")
    job_script_prologue: tuple[str, ...] = option((), "lines", "shell lines before the command", aliases=("env_extra",))
    log_directory: str | None = option(None, "text", "folder for the job's output")
    python: str | None = option(None, "text", "Python of the ranks; this one if unset")
    site: str | None = option(None, "text", "name of a site file, or a path to one")
    site_limits: bool = option(True, "flag", "refuse what the site's file says that the site refuses")
    workers_per_gpu: int = option(1, "count", "workers that share each GPU, and its memory")
    cores: str | int = option(
        "all",
        "cores",
        "cores of each worker: 'all' shares out what the job has, 'local' takes those on the GPU's NUMA node only, "
        "a number is so many",
    )
    reserved_cores: int = option(
        0, "number", "cores of each node left free of workers, for progress threads, scheduler and nannies"
    )
    memory_policy: str = option(
        "preferred-many",
        "choice",
        "where a worker's host memory goes: on the NUMA nodes next to it while there is room, on them only, "
        "on all in turn, or as the kernel likes",
        choices=("preferred-many", "bind", "interleave", "none"),
    )
    nics: str | tuple[str, ...] = option(
        "balanced",
        "nics",
        "network ports of the workers: 'balanced', 'nearest', 'ucx' (left to UCX), or the names that may be used",
        example="'mlx5_0,mlx5_1:2'",
    )
    respect_launcher: bool = option(
        False, "flag", "keep each worker inside its own rank's mask; otherwise the masks of a node's ranks together"
    )
    device_memory_limit: Limit = option(
        DEVICE, "device-limit", "where spilling from the GPU begins: bytes, or a fraction of its memory; 0 = never"
    )
    memory_limit: Limit = option(
        SHARE, "host-limit", "host memory of one worker; its share of the node if unset, 0 = no limit"
    )
    jit_unspill: bool = option(
        False, "flag", "spill single objects, restore them at first use", aliases=("enable_jit_unspill",)
    )
    rmm_pool_size: Limit = option(
        NO_LIMIT, "limit", "pool of the RAPIDS Memory Manager: bytes, or a fraction of the GPU's memory; 0 = none"
    )
    rmm_maximum_pool_size: Limit = option(
        NO_LIMIT, "limit", "size to which that pool may grow (with rmm_async: all that may be allocated)"
    )
    rmm_managed_memory: bool = option(False, "flag", "RMM takes managed (unified) memory")
    rmm_async: bool = option(False, "flag", "RMM takes CUDA's asynchronous allocator")
    rmm_release_threshold: Limit = option(
        NO_LIMIT, "limit", "size above which unused memory of rmm_async goes back to the GPU; 0 = it stays"
    )
    rmm_allocator_external_lib_list: tuple[str, ...] = option(
        (), "texts", "libraries that allocate through RMM: cupy, torch", aliases=("set_rmm_allocator_for_libs",)
    )
    rmm_log_directory: str | None = option(None, "text", "folder for a log of each worker's allocations (slow)")
    rmm_track_allocations: bool = option(False, "flag", "RMM counts what is allocated (slow)")
    enable_cudf_spill: bool = option(False, "flag", "cuDF spills its own objects; the store leaves them alone")
    cudf_spill_stats: int = option(0, "number", "level of cuDF's statistics of its spilling; 0 = none")
    local_directory: str | None = option(
        None, "text", "fast local folder for spilled data and all files of a run, with ~ and $VARIABLES of its node"
    )
    trust_local_directory: bool = option(
        False, "flag", "take local_directory also where others can change a folder above it, and so run code as you"
    )
    protocol: str | None = option(
        None,
        "choice",
        "how processes talk: 'tls' is encrypted TCP, and the default; 'tcp' is plain; 'ucx' takes the network's own "
        "way, also from GPU to GPU (distributed-ucxx), and is not encrypted",
        choices=("tcp", "tls", "ucx"),
    )
    security: bool | None = option(
        None,
        "flag",
        "encrypt every connection (TLS), and let in only who has the cluster's certificate; on, unless protocol is "
        "'tcp' or 'ucx'",
    )
    node_copies: bool = option(
        True,
        "flag",
        "large values go between the processes of one node by one copy of the kernel, and not through the connection",
    )
    interface: str | None = option(None, "text", "network interface of scheduler and workers")
    rendezvous: str = option(
        "mpi",
        "choice",
        "how the ranks meet: by 'mpi', or without MPI by a private 'file' on a file system that they share; with ucx "
        "as the protocol by 'file'",
        choices=("mpi", "file"),
    )
    launcher: str | None = option(
        None, "text", "what starts the ranks: srun, mpirun, fork, or a command of your own; found if unset"
    )
    client_grace_s: float = option(
        30.0, "seconds", "how long the job outlives a client that fell silent", user_name="client_grace"
    )
    death_timeout_s: float = option(
        60.0,
        "seconds",
        "how long ranks wait for each other, and a run for workers that have all paused",
        user_name="death_timeout",
    )
    dashboard: bool = option(True, "flag", "the scheduler's dashboard, on loopback behind a secret")
    dashboard_port: int = option(
        0,
        "port",
        "port of this machine's loopback for the link to the dashboard; the next free one if it is taken",
        aliases=("dashboard_address",),
    )
    scheduler_port: int = option(0, "port", "port of the scheduler; a free one if 0")
    progress: bool = option(False, "flag", "say on standard error how many tasks are done")
    resources: Mapping[str, float] = option(MappingProxyType({}), "numbers", "Dask resources of each worker")
    allocator: str = option(
        "system",
        "choice",
        "what gives the workers host memory: the C library, or jemalloc where it is installed",
        choices=("system", "jemalloc"),
    )
    env: Mapping[str, str] = option(
        MappingProxyType({}), "environment", "variables of the workers; commas belong to a value"
    )
    sources: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def rmm_libraries(self) -> tuple[str, ...]:
        """Libraries that are to allocate through RMM; dask-cuda also takes them as one text with commas."""
        words = (word.strip() for text in self.rmm_allocator_external_lib_list for word in text.split(","))
        return tuple(dict.fromkeys(filter(None, words)))

    @property
    def warning_s(self) -> float:
        """How long before its time limit a job begins to end; 0 without one. Short jobs keep most of their time."""
        return min(self.drain_s, (self.walltime_s or 0) / 4)

    def cite(self, name: str) -> str:
        """Return what was given for an option, by the name users type, and where, for messages."""
        (value,) = (getattr(self, f.name) for f in options() if user_name(f) == name)
        return f"{name}={value!r} (set by {self.where(name)})"

    def where(self, name: str) -> str:
        """Return where the option, by the name users type, was set; ``default`` if nowhere."""
        return self.sources.get(name, "default")


def options() -> tuple[Field[Any], ...]:
    """Return the options' fields, in their order."""
    return tuple(f for f in fields(Settings) if f.metadata)


def user_name(f: Field[Any]) -> str:
    """Return the name that users type."""
    return f.metadata["user_name"] or f.name
