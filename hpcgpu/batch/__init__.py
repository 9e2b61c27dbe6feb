"""Floor 2, batch systems: one module per system, each a pure value. Commands go out, results come in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from types import MappingProxyType
from typing import Any, Protocol

from hpcgpu.batch.local import Local as Local
from hpcgpu.batch.pbs import Pbs as Pbs
from hpcgpu.batch.slurm import Slurm as Slurm
from hpcgpu.errors import ConfigError
from hpcgpu.model import Command, JobSpec, JobStatus, Result


class BatchSystem(Protocol):
    """What is asked of a batch system: each question a command, and the reading of its result.

    A ``read_`` method raises :class:`~hpcgpu.errors.SubmitError`, with the program's own words, when the
    question itself failed; ``transient`` tells whether to ask again. A state that is not known is
    ``UNKNOWN``, never an error.
    """

    def script(self, spec: JobSpec) -> str:
        """Return the job script: options, prologue, environment, and one quoted command whose exit code is the job's.

        Raises
        ------
        ConfigError
            A value that the batch system's options cannot carry.

        """

    def log(self, spec: JobSpec, job_id: str) -> str:
        """Return the path of the job's output, relative to the folder of submission if no folder was given."""

    def submit(self, script: str, spec: JobSpec) -> Command:
        """Return the command that submits the script, which it reads from its standard input."""

    def read_submit(self, result: Result) -> str:
        """Return the job id. After a time-out the job may be there all the same."""

    def status(self, job_ids: Sequence[str]) -> Command:
        """Return one command that asks for all these jobs."""

    def history(self, job_ids: Sequence[str]) -> Command:
        """Return one command that asks for jobs that ``status`` does not list any more, or not with their end."""

    def read_status(self, result: Result) -> Mapping[str, JobStatus]:
        """Return what ``status`` or ``history`` lists. A job that is not in it is missing, not ended."""

    def onto(self, job_id: str, node: str, argv: tuple[str, ...]) -> tuple[str, ...]:
        """Return the command that runs another one on a node of a running job, its stdin and stdout connected."""

    def cancel(self, job_id: str) -> Command:
        """Return the command that ends one job, pending or running."""

    def read_cancel(self, result: Result) -> bool:
        """Return False when the job was gone already."""


SYSTEMS: Mapping[str, type[Slurm] | type[Pbs] | type[Local]] = MappingProxyType(
    {"slurm": Slurm, "pbs": Pbs, "local": Local}
)


def get(name: str, **dialect: Any) -> BatchSystem:  # noqa: ANN401 - fields of the system's own class
    """Return the batch system ``name``, spoken to as the site wants (the fields of its class).

    Raises
    ------
    ConfigError
        No such batch system, or it has no such field.

    """
    system = SYSTEMS.get(name)
    if system is None:
        raise ConfigError(f"there is no batch system {name!r}; allowed: {', '.join(SYSTEMS)}")
    allowed = [f.name for f in fields(system)]
    if unknown := next((key for key in dialect if key not in allowed), None):
        raise ConfigError(f"{unknown!r} says nothing about {name}; allowed: {', '.join(allowed) or 'no field'}")
    return system(**dialect)
