"""Every option, declared once: name, default, kind of value, and what it means; flags, numbers and memory limits.

The name users type is the field's name, or ``user_name`` where the field carries a unit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any, TypeVar

from hpcgpu.errors import ConfigError, marked, opt, plain
from hpcgpu.model.allocation import BindingRules
from hpcgpu.units import meant, parse_bytes

FLAGS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
NIC_RULES = ("balanced", "nearest", "ucx")
MARKS = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")  # no shell line or batch directive carries these; a tab is fine
_NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?\s*", re.IGNORECASE)
T = TypeVar("T")
_SMALLEST = 1024  # a smaller limit is a typing error: a fraction or a unit was meant
_SIZE = "a size ('5GB', 5_000_000_000)"
_NONE = "or 0 or 'off' for none"
_LIMIT = f"allowed: a fraction of the memory (0.8 or '0.8', at most 1.0), {_SIZE}, {_NONE}"
GPU_MEMORY = "the size of this GPU's memory (NVML does not answer)"
NODE_MEMORY = "the host memory of this node"
_PART = f"allowed: a fraction from 0 to 1 (0.6 or '0.6'), {_NONE}"
# A rank that only waits looks up 580 names in its Python environment, a leader 4,900 (strace, 2026-11-28): on a node of
# 8 GPUs 1,120 for each GPU with a rank per GPU, 610 with one. On 16 such nodes that is 143,000 look-ups, or 78,000.
_MANY_NODES = 16
# Those that Dask's own workers have, too.
DASK_WORKER = ("nthreads", "memory_limit", "local_directory", "interface", "protocol", "resources", "death_timeout")
FROM = "option --{flag}"  # the source of an option that was typed at a command line


def read_option(name: str, value: object, where: str, read: Callable[[object], T]) -> T:
    """Convert an option's value by ``read``, adding name and source to its ConfigError; NumPy's numbers are allowed."""
    if isinstance(value, Real) and not isinstance(value, bool):
        value = int(value) if isinstance(value, Integral) else float(value)
    elif type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_"):  # of NumPy 2, and 1
        value = bool(value)  # it is no subclass of Python's
    try:
        return read(value)
    except ConfigError as error:
        raise ConfigError(f"{opt(name, None)}: {marked(error)}; set by {opt(where, None)}") from error


def plain_number(value: object) -> float | None:
    """Parse a plain number, also from text; None for everything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    if isinstance(value, str) and not _NUMBER.fullmatch(value):
        return None
    try:
        number = float(value)
    except OverflowError as error:
        raise ConfigError(f"{value!r} is too large") from error
    if not math.isfinite(number):
        raise ConfigError(f"{value!r} is not a finite number")
    return number


def read_flag(value: object) -> bool:
    """Parse a flag, also from text: ``yes``, ``off``."""
    flag = FLAGS.get(value.strip().lower()) if isinstance(value, str) else value
    if not isinstance(flag, bool):
        raise ConfigError(f"{value!r} is neither true nor false; allowed: True or False (as text: true, false)")
    return flag


def read_text(value: object) -> str:
    """Parse text of one line, also from a path."""
    if hasattr(value, "__fspath__"):
        value = value.__fspath__()
    if not isinstance(value, str):
        hint = f" (in quotes: '{value}')" if isinstance(value, int) and not isinstance(value, bool) else ""
        raise ConfigError(f"{value!r} is not text; allowed: text of one line{hint}")
    return one_line(value)


def one_line(value: str, what: str = "text") -> str:
    """Return the text if it is not empty and has neither newline nor control character; raise otherwise."""
    if not value.strip() or MARKS.search(value):
        raise ConfigError(f"{value!r} is no {what}: it is empty, or has a newline or control character")
    return value


@dataclass(frozen=True, slots=True, repr=False)
class Limit:
    """Limit memory by bytes, by a part of it, by an equal share of it, or not at all (false).

    ConfigError for any other value; the read functions below parse user input.
    """

    value: int | float | str = 0  # bytes, 0: no limit; float in (0, 1]: a part of the memory; "auto": an equal share

    def __post_init__(self) -> None:
        value = self.value
        ok = 0 < value <= 1 if isinstance(value, float) else value == "auto" or (isinstance(value, int) and value >= 0)
        if not ok or isinstance(value, bool):
            raise ConfigError(f"{value!r} is no limit; allowed: bytes as int, a part as float, 'auto'")

    def __bool__(self) -> bool:
        return bool(self.value)

    def __repr__(self) -> str:
        return repr(self.value)

    @property
    def is_part(self) -> bool:
        """True if it is a fraction of a memory."""
        return isinstance(self.value, float)

    @property
    def nbytes(self) -> int:
        """The bytes, if given as bytes; else 0."""
        return self.value if isinstance(self.value, int) else 0

    def bytes_of(self, memory_bytes: int, option: str, memory: str, workers: int = 1, where: str = "") -> int:
        """Compute the limit in bytes, 0 for none; ``memory_bytes=0``: unknown, a ConfigError for a fraction.

        The error names the option and where it was set, and the memory ("the size of this GPU's memory").
        """
        if isinstance(self.value, str):
            return memory_bytes // max(workers, 1)
        if isinstance(self.value, int):
            return self.value
        if not memory_bytes:
            raise ConfigError(
                f"{opt(option, self.value, where)} is a fraction, but {memory} is not known: give it in bytes, such "
                f"as {opt(option, '30GB')}"
            )
        return int(self.value * memory_bytes)

    def of_device(self, memory_bytes: int, where: str = "") -> int:
        """Compute the bytes on a device at which spilling begins, at most its size; 0: never.

        ``memory_bytes`` is the device's memory or the worker's share of it; 0: unknown, a ConfigError for a fraction.
        """
        size = self.bytes_of(memory_bytes, "device_memory_limit", GPU_MEMORY, where=where)
        return min(size, memory_bytes) if memory_bytes else size


NO_LIMIT = Limit(0)
SHARE = Limit("auto")
DEVICE = Limit(0.8)  # as dask-cuda's


def read_limit(value: object) -> Limit:
    """Parse a user's limit. 1 is refused: it is one byte to dask-cuda, and 100 % to its reader."""
    if isinstance(value, Limit):
        return value
    if _is_none(value):
        return NO_LIMIT
    number = plain_number(value)
    if number is None:
        return Limit(_checked(value, _LIMIT))
    whole = isinstance(value, int) or (isinstance(value, str) and value.strip().isdecimal())
    if not whole and 0 < number <= 1:
        return Limit(number)
    if number < 0 or not number.is_integer() or 0 < number < _SMALLEST:
        hint = " (1.0 is the whole memory; as a size it would be one byte)" if number == 1 else ""
        raise ConfigError(f"{value!r} is neither a fraction nor a size{hint or meant(value)}; {_LIMIT}")
    return Limit(int(value) if isinstance(value, (int, str)) and whole else int(number))


def read_device_limit(value: object) -> Limit:
    """Parse a limit, or ``default``, which dask-cuda allows for this option alone (utils.py, 26.10)."""
    return DEVICE if value == "default" else read_limit(value)


def read_host_limit(value: object) -> Limit:
    """Parse a limit, or ``auto``: Dask's word for a share of the node."""
    return SHARE if value == "auto" else read_limit(value)


def read_disk_limit(value: object) -> int:
    """Parse a limit into bytes; 0: no limit. A fraction of a disk is not allowed."""
    if _is_none(value):
        return 0
    return _checked(value, f"allowed: {_SIZE}, {_NONE}")


def read_part(value: object) -> float:
    """Parse a part of a limit; 0: no limit."""
    if _is_none(value):
        return 0.0
    number = plain_number(value)
    if number is None or not 0 <= number <= 1:
        raise ConfigError(f"{value!r} is no fraction; {_PART}")
    return number


def read_size(value: object, allowed: str) -> int:
    """Parse a size into bytes, from a number or from text with a unit."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # 5e9
    try:
        return parse_bytes(value)
    except (ConfigError, OverflowError) as error:
        raise ConfigError(f"{value!r} is not a size; {allowed}") from error


def _is_none(value: object) -> bool:
    return value is None or value is False or value == "off"  # YAML reads off as False


def _checked(value: object, allowed: str) -> int:
    size = read_size(value, allowed)
    if size < _SMALLEST and re.search("[1-9]", str(value)):  # '0.0001KB' is below one byte, but is not "no limit"
        raise ConfigError(f"{value!r} is less than {_SMALLEST} bytes{meant(value)}; {allowed}")
    return size


def option(default: Any, kind: str, text: str, **more: Any) -> Any:  # the field's own annotation says the type
    """Return a dataclass field; ``more``: user_name, choices, example, or aliases in dask-jobqueue and dask-cuda."""
    metadata = {"kind": kind, "text": text, "user_name": "", "choices": (), "aliases": (), "example": "", **more}
    if isinstance(default, Mapping):  # read-only, but Python 3.11 takes every unhashable default for a mutable one
        return field(default_factory=lambda: default, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The values of one run, and the source of each that is not a default."""

    nodes: int = option(1, "count", "nodes of the job")
    gpus_per_node: int | None = option(
        None, "number", "GPUs (and workers) on each node; all that are granted if unset; 0 with cpu_workers: none"
    )
    gpus: str | None = option(
        None,
        "gpus",
        "GPUs of the whole job, at a known site or with gpus_per_node or simulate; or 'sim:4', 'sim:4x256MiB': the "
        "short form of simulate",
    )
    simulate: str | None = option(
        None, "simulate", "simulated GPUs of each node: '4', or '4x256MiB' with the memory of each"
    )
    ranks: str = option(
        "auto",
        "choice",
        "one MPI rank per GPU, or one per node; auto: per GPU in jobs of less than 16 nodes",
        choices=("auto", "gpu", "node"),
    )
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
    requeue: bool = option(
        False,
        "flag",
        "the job with the scheduler asks to be started again, so long before its time limit as drain says",
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
    environment: str = option(
        "plain",
        "choice",
        "where the ranks start Python from: its own place, or a copy (stage) that each node makes on its own disk, in "
        "local_directory, for the time of the job",
        choices=("plain", "stage"),
    )
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
        "as the protocol, and for Open MPI in a Slurm whose srun has no PMIx, by 'file'",
        choices=("mpi", "file"),
    )
    launcher: str | None = option(
        None, "text", "what starts the ranks: srun, mpirun, pbs_tmrsh, fork, or a command; found if unset"
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
    resources: Mapping[str, float] = option(MappingProxyType({}), "numbers", "Dask resources of each worker")
    allocator: str = option(
        "system",
        "choice",
        "what gives the workers host memory: the C library, or jemalloc where it is installed",
        choices=("system", "jemalloc"),
    )
    carbon_g_per_kwh: float | None = option(
        None, "amount", "grams of CO2 for each kWh, of the site's electricity: the summary of a run has its CO2 then"
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
        """How long before its time limit, its queue's without one, a job begins to end; short jobs keep most of it."""
        return min(self.drain_s, (self.walltime_s or math.inf) / 4)

    @property
    def binding_rules(self) -> BindingRules:
        """The settings of a plan of bindings."""
        return BindingRules(*(getattr(self, name) for name in BindingRules._fields))

    @property
    def is_typed(self) -> bool:
        """Return whether options were typed at a command line, in whose form messages name them."""
        return any(where.startswith(FROM.partition("{")[0]) for where in self.sources.values())

    def ranks_per(self, nodes: int) -> str:
        """Return what has a rank of its own in a job of so many nodes: ``gpu`` or ``node``."""
        return self.ranks if self.ranks != "auto" else "node" if nodes >= _MANY_NODES else "gpu"

    def cite(self, name: str) -> str:
        """Return what was given for an option, by the name users type, and where."""
        return plain(self.opt(name))

    def opt(self, name: str) -> str:
        """Return the same for the message of an error."""
        (value,) = (getattr(self, f.name) for f in options() if user_name(f) == name)
        return opt(name, dict(value) if isinstance(value, Mapping) else value, self.where(name))

    def where(self, name: str) -> str:
        """Return where the option, by the name users type, was set; ``default`` if nowhere."""
        return self.sources.get(name, "default")


def options() -> tuple[Field[Any], ...]:
    """Return the options' fields, in their order."""
    return tuple(f for f in fields(Settings) if f.metadata)


def user_name(f: Field[Any]) -> str:
    """Return the name that users type."""
    return f.metadata["user_name"] or f.name


BY_NAME: Mapping[str, Field[Any]] = MappingProxyType(
    {name: f for f in options() for name in (user_name(f), *f.metadata["aliases"])}
)
# Options that set up RMM and cuDF, with dask-cuda's names.
RMM = tuple(f.name for f in options() if f.name.startswith("rmm_"))
CUDF = tuple(f.name for f in options() if "cudf_" in f.name)
# Options that are about a worker, not about ranks and jobs, beyond those that Dask's own workers have.
WORKER = (
    *("gpus", "simulate", "workers_per_gpu", "cores", "reserved_cores", "memory_policy", "nics", "env"),
    *("trust_local_directory", "device_memory_limit", "jit_unspill", *RMM, *CUDF),
)

# Headings of help and reference, and the options below each, by the names users type.
GROUPS: Mapping[str, tuple[str, ...]] = {
    "Size": ("site", "nodes", "gpus_per_node", "gpus", "simulate", "workers_per_gpu", "cpu_workers", "nthreads"),
    "Batch job": (
        *("queue", "account", "walltime", "cores_per_gpu", "memory", "job_name", "log_directory", "site_limits"),
        *("job_extra_directives", "job_directives_skip", "job_script_prologue"),
    ),
    "Life": ("shape", "scheduler", "drain", "requeue", "client_grace", "death_timeout"),
    "Memory": ("device_memory_limit", "memory_limit", "jit_unspill", "local_directory", "trust_local_directory"),
    "Binding": ("cores", "reserved_cores", "memory_policy", "nics", "respect_launcher"),
    "Network": (
        *("protocol", "security", "node_copies", "interface"),
        *("scheduler_port", "dashboard", "dashboard_port"),
    ),
    "Start": ("ranks", "launcher", "rendezvous", "python", "environment"),
    "Workers": ("resources", "env", "allocator", "carbon_g_per_kwh"),
    "RMM and cuDF": (*RMM, *CUDF),
}
