"""The document of a run, which its ranks read."""

from __future__ import annotations

from dataclasses import dataclass, field

from hpcgpu.model.settings import Settings

VERSION = 2


@dataclass(frozen=True, slots=True)
class RunDocument:
    """Describe a run, without secrets and without facts about a node: each node plans its bindings in the job."""

    settings: Settings = field(default_factory=Settings)
    # gang: a job with a client outside; in-allocation; head: a scheduler without workers, with a client outside;
    # member: workers that join the cluster whose folder is ``folder``
    shape: str = "in-allocation"
    script: tuple[str, ...] = ()  # argv of the user's script, run by rank 0; empty: a client outside drives the cluster
    # on a shared file system, for the files of the rendezvous and of the client; empty: the ranks meet by MPI, and
    # there is no client outside
    folder: str = ""
    # identifier of this launch, if ranks meet by files; empty under another launcher, and until ``hpcgpu launch``
    # starts them
    launch: str = ""
    exit_file: str = ""  # where rank 0 writes its exit code; empty: the program that started it returns the code
    version: int = VERSION
