"""Facts for the doctor's checks, as they were seen on the login node and in a short job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hpcgpu.model import Hop, Nic


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The job as the batch system is asked for it, and its words: when it expects to start it, or why it refuses it.

    ``unasked``: why it was not asked. Empty: it was.
    """

    batch: str
    starts: str = ""
    refused: str = ""
    unasked: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """A folder, and the type of its file system (empty: unknown), which other nodes can see or which lies in memory.

    ``free_bytes`` and ``free_files`` are for this user; -1: unknown, or without end. ``create_s``: to create and remove
    one small file. ``bytes_per_s``: written with fsync; 0: not written. ``clock_s``: the file server's clock less ours.
    """

    path: str
    kind: str = ""
    network: bool = False
    memory: bool = False
    free_bytes: int = -1
    free_files: int = -1
    create_s: float = 0.0
    bytes_per_s: float = 0.0
    clock_s: float = 0.0
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a process (soft); -1: no limit."""

    files: int
    processes: int
    locked_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """A machine's name, the addresses to which it resolves, and those of its interfaces."""

    host: str
    resolved: tuple[str, ...] = ()
    own: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Python:
    """A Python: its path, version, machine architecture, and the versions of packages.

    Attributes
    ----------
    broken : str
        Why packages cannot be imported; empty: they can, or were not tried.
    import_s : float
        How long it took to import them.

    """

    path: str
    version: str
    machine: str
    packages: Mapping[str, str]
    broken: str = ""
    import_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoginFacts:
    """The observations on the login node; None: not looked at, and ``unknown`` says why."""

    request: Request | None = None
    python: Python | None = None
    environment: Folder | None = None
    home: Folder | None = None
    scratch: Folder | None = None
    limits: Limits | None = None
    names: Names | None = None
    unknown: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """An attempt to connect.

    Attributes
    ----------
    source, target : str
        Names of the machines.
    interface, address : str
        Of the target.
    protocol : str
        ``tcp``, ``tls``, or ``ucx``.
    took_s : float
        Until the answer came, of TCP and TLS with the handshake.
    clock_s : float
        The target's clock less the source's.
    error : str
        Why it failed; empty: it did not.

    """

    source: str
    target: str
    interface: str
    address: str
    protocol: str = "tcp"
    took_s: float = 0.0
    clock_s: float = 0.0
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """The command that starts the ranks, and what came of it.

    Attributes
    ----------
    command : str
        Empty: one process for all workers, without a launcher.
    error : str
        Why no launcher fits; empty: one does.
    library : str
        The ranks' MPI library; empty: no rank has told it.
    worlds : tuple of int
        The size of its MPI world, as each rank has told it.
    exit_code : int
        Of the command; None: it was not tried, for the ranks need no MPI.
    output : str
        The first lines of what it printed.

    """

    command: str = ""
    error: str = ""
    library: str = ""
    worlds: tuple[int, ...] = ()
    exit_code: int | None = None
    output: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpeed:
    """A GPU: its name, cuInit and context in seconds, page-locked copies from near and far memory in bytes/s.

    ``cuda`` is the latest CUDA that the driver can do, as its API counts: 12080 is 12.8.
    """

    name: str
    init_s: float
    cuda: int = 0
    near_bytes_per_s: float = 0.0
    far_bytes_per_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ucx:
    """UCX's version and its transports."""

    version: str
    transports: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """The observations on one node of the job; None: not looked at, and ``unknown`` says why.

    Attributes
    ----------
    cpus : int
        PUs that the job's processes may use.
    cores : int
        PUs of the node.
    memory_bytes : int
        Host memory that the kernel lets the job use.
    gpus : tuple of str
        Names of the NVIDIA GPUs that NVML shows.
    compute_modes : tuple of str
        Of each: :attr:`hpcgpu.model.Gpu.compute_mode`.
    driver, no_driver : str
        Version of their driver, or why none answers.
    granted_gpus : int or None
        GPUs of this node that the batch system has granted; None: it does not tell.
    hops : tuple of Hop
        PCI paths between GPUs and NICs.
    ucx : Ucx
        As ``ucx_info`` tells it.
    no_ucx_links : str
        Why no other node was connected to by UCX; empty: those that serve it were.

    """

    host: str
    python: Python
    limits: Limits
    cpus: int
    cores: int
    memory_bytes: int
    temporary: str
    gpus: tuple[str, ...] = ()
    compute_modes: tuple[str, ...] = ()
    driver: str = ""
    no_driver: str = ""
    granted_gpus: int | None = None
    nics: tuple[Nic, ...] | None = None
    hops: tuple[Hop, ...] = ()
    scratch: Folder | None = None
    speed: GpuSpeed | None = None
    ucx: Ucx | None = None
    no_ucx_links: str = ""
    links: tuple[Link, ...] = ()
    unknown: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialFacts:
    """The observations of the job, from the login node and by its nodes.

    Attributes
    ----------
    job_id : str
        The job.
    folder : str
        The folder in the home into which its nodes write.
    wanted_nodes, wanted_gpus : int
        Nodes, and GPUs of each node, that were asked for; simulated GPUs are not counted.
    protocol : str
        Of the workers; empty: the default.
    python : Python
        The login node's.
    nodes : tuple of NodeFacts
        Those that have answered.
    ended : str
        How the job ended, in the batch system's words.
    output : str
        The last lines of the job's output; empty: it cannot be read here.
    launcher : Launcher or None
        How the ranks are started.
    links : tuple of Link or None
        From the login node to the job's nodes.

    """

    job_id: str
    folder: str
    wanted_nodes: int
    wanted_gpus: int
    protocol: str
    python: Python
    nodes: tuple[NodeFacts, ...] = ()
    ended: str = ""
    output: str = ""
    launcher: Launcher | None = None
    links: tuple[Link, ...] | None = None
    unknown: Mapping[str, str] = field(default_factory=dict)
