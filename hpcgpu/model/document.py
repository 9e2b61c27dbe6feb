"""The run document: the one thing that all four doors hand to the rank program."""

from __future__ import annotations

from dataclasses import dataclass, field

from hpcgpu.model.settings import Settings

VERSION = 1


@dataclass(frozen=True, slots=True)
class RunDocument:
    """What a run is. Holds no secret and no fact of a node: bindings are planned in the job, on each node.

    Attributes
    ----------
    shape : str
        ``gang`` (a job of its own, a client outside), ``in-allocation``, ``head`` (a scheduler without
        workers, a client outside), or ``member`` (workers that join the cluster whose folder ``meeting`` is).
    script : tuple of str
        argv of the user's script, run by rank 0; empty when a client outside drives the cluster.
    meeting : str
        Folder for the files of the meeting and of the client, on a shared file system; empty
        when the ranks meet by MPI and no client is outside.
    launch : str
        What tells this launch from any other, where its ranks meet by files; empty until ``hpcgpu launch`` starts
        them, and where another launcher does.

    exit_file : str
        Where rank 0 writes its exit code when it has ended; empty where whatever started it returns that itself.

    """

    settings: Settings = field(default_factory=Settings)
    shape: str = "in-allocation"
    script: tuple[str, ...] = ()
    meeting: str = ""
    launch: str = ""
    exit_file: str = ""
    version: int = VERSION
