"""The run document: what all four ways to start a run pass to the rank program."""

from __future__ import annotations

from dataclasses import dataclass, field

from hpcgpu.model.settings import Settings

VERSION = 2


@dataclass(frozen=True, slots=True)
class RunDocument:
    """The description of a run.

    It has no secret, and no fact about a node: bindings are planned in the job, on each node.

    Attributes
    ----------
    shape : str
        ``gang`` (a job of its own, a client outside), ``in-allocation``, ``head`` (a scheduler without
        workers, a client outside), or ``member`` (workers that join the cluster whose folder ``folder`` is).
    script : tuple of str
        argv of the user's script, run by rank 0; empty when a client outside drives the cluster.
    folder : str
        The run's folder on a shared file system, for the files of the rendezvous and of the client; empty if the
        rendezvous is by MPI and there is no client outside.
    launch : str
        An identifier of this launch, if its ranks meet by files; empty until ``hpcgpu launch`` starts them, and under
        another launcher.
    exit_file : str
        Where rank 0 writes its exit code when it has ended; empty if the program that started it returns that code.

    """

    settings: Settings = field(default_factory=Settings)
    shape: str = "in-allocation"
    script: tuple[str, ...] = ()
    folder: str = ""
    launch: str = ""
    exit_file: str = ""
    version: int = VERSION
