"""The facts that the doctor collects on nodes, and by its short job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hpcgpu.model import Hop, Nic
from hpcgpu.model.allocation import Limits
from hpcgpu.plan.jobs.needs import Size


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """A folder and its file system."""

    path: str
    kind: str = ""  # the file system's type; "": unknown
    network: bool = False  # other nodes can see such a file system
    memory: bool = False  # it is in memory
    free_bytes: int = -1  # for this user; -1: unknown
    free_files: int = -1  # for this user; -1: unknown, or unlimited
    create_s: float = 0.0  # creation and removal of one small file
    bytes_per_s: float = 0.0  # of writing, with fsync; 0: not written
    clock_s: float = 0.0  # the file server's clock minus this machine's
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """A machine's names and addresses."""

    host: str
    resolved: tuple[str, ...] = ()  # the addresses of the host's name
    interfaces: tuple[tuple[str, str], ...] = ()  # (interface, address)


@dataclass(frozen=True, slots=True, kw_only=True)
class Python:
    """A Python and its packages."""

    path: str
    version: str  # of a free-threaded build with that word
    machine: str  # the CPU architecture
    packages: Mapping[str, str]  # versions by name
    broken: str = ""  # why packages cannot be imported, or are too old; "": neither was seen
    import_s: float = 0.0  # of the packages


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """An attempt to connect two machines by TCP."""

    source: str  # a machine's name
    target: str  # a machine's name
    interface: str  # of the target
    address: str  # of the target
    took_s: float = 0.0  # until the answer
    clock_s: float = 0.0  # the target's clock minus the source's
    error: str = ""  # "": it connected


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """The command that starts the ranks, and its result."""

    command: str = ""  # "": one process for all workers, no launcher
    error: str = ""  # why no launcher fits; "": one does
    library: str = ""  # the ranks' MPI library; "": no rank has reported it
    worlds: tuple[int, ...] = ()  # the size of the MPI world, as each rank reports it
    exit_code: int | None = None  # None: not tried, because the ranks need no MPI
    output: str = ""  # its first lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Ucx:
    """UCX's version and transports."""

    version: str
    transports: tuple[str, ...]
    folder: str = ""  # of the libraries that workers load; "": workers have no ucxx, and it is that of PATH
    has_ib: bool = True  # has it a module for InfiniBand and RoCE?


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """The facts of one node of the job; of a fact that is None, ``unknown`` has the reason."""

    host: str
    python: Python
    limits: Limits
    cpus: int  # PUs that the job's processes may use
    cores: int  # PUs of the node
    memory_bytes: int  # host memory that the kernel lets the job use
    temporary: str  # the folder of temporary files
    gpus: tuple[str, ...] = ()  # names of the NVIDIA GPUs by NVML
    compute_modes: tuple[str, ...] = ()  # of each: model.Gpu.compute_mode
    driver: str = ""  # its version; "": none
    no_driver: str = ""  # why no driver answers
    nvlink_domain: str = ""  # the UUID of its GPUs' NVLink domain of several nodes; "": none
    imex_channel: bool = True  # may processes open IMEX's channel, if there is such a domain?
    granted_gpus: int | None = None  # by the batch system; None: unknown
    nics: tuple[Nic, ...] | None = None
    hops: tuple[Hop, ...] = ()  # PCI paths between GPUs and NICs
    scratch: Folder | None = None
    ucx: Ucx | None = None  # by ucx_info
    links: tuple[Link, ...] = ()
    copy_obstacle: str = ""  # why its processes cannot read each other's memory; "": they can
    unknown: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialFacts:
    """The facts of the job, from the login node and from its nodes."""

    job_id: str
    folder: str  # in the home; its nodes write into it
    requested_nodes: int  # requested
    requested_gpus: int  # of each node, requested; simulated ones do not count
    protocol: str  # of the workers; "": the default
    size: Size | None = None  # of the cluster for which the job stands; None: unknown
    python: Python  # of the login node
    nodes: tuple[NodeFacts, ...] = ()  # those that have answered
    ended: str = ""  # the job's end, in the batch system's words
    output: str = ""  # the last lines of the job's output; "": not readable here
    launcher: Launcher | None = None  # of the ranks
    links: tuple[Link, ...] | None = None  # from the login node to the job's nodes
    unknown: Mapping[str, str] = field(default_factory=dict)
