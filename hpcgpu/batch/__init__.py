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
from hpcgpu.model import Command, JobSpec, JobStatus, Offer, Result


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

    def notes(self, spec: JobSpec) -> tuple[str, ...]:
        """Return what people should know of such a request before it is made."""

    def submit(self, script: str, spec: JobSpec) -> Command:
        """Return the command that submits the script, which it reads from its standard input."""

    def read_submit(self, result: Result) -> str:
        """Return the job id. The job may be there all the same after an error that is ``unsure``."""

    def find(self, name: str, mark: str) -> Command | None:
        """Return the command that asks for the jobs that have been submitted as these; None where jobs have no mark."""

    def read_found(self, result: Result, mark: str) -> tuple[str, ...]:
        """Return the ids that ``status`` is to be asked of: it names an array's elements, and says who has ended."""

    def split(self, count: int) -> tuple[int, ...]:
        """Return the sizes of the fewest submissions for ``count`` jobs that the site's array limit allows."""

    def elements(self, job_id: str, count: int) -> tuple[str, ...]:
        """Return the ids of the ``count`` jobs that were submitted as ``job_id``, by their index in the array."""

    def status(self, job_ids: Sequence[str]) -> Command:
        """Return one command that asks for all these jobs and elements; it does not grow with the elements."""

    def history(self, job_ids: Sequence[str]) -> Command:
        """Return one command that asks for jobs that ``status`` does not list any more, or not with their end."""

    def read_status(self, result: Result, job_ids: Sequence[str] = ()) -> Mapping[str, JobStatus]:
        """Return what ``status`` or ``history`` lists, elements in place of their array; it may be more than was asked.

        A job that is not in it is missing, not ended. ``job_ids`` are those that were asked for: of an array that
        is gone as a whole the batch system names no elements, but they have ended with it.
        """

    def offers(self, spec: JobSpec) -> Command | None:
        """Return the command that asks what there is for such a job; None where that is not asked, or not compared."""

    def read_offers(self, result: Result) -> tuple[Offer, ...]:
        """Return the nodes of each kind and the limits; nothing when there was no answer."""

    def nodes(self, hosts: Sequence[str]) -> Command | None:
        """Return the command that asks how these nodes are; None where there are none but this machine."""

    def read_nodes(self, result: Result) -> Mapping[str, str]:
        """Return what is said of those that are lost; nothing when there was no answer."""

    def onto(self, job_id: str, node: str, argv: tuple[str, ...]) -> tuple[str, ...]:
        """Return the command that runs another one on a node of a running job, its stdin and stdout connected."""

    def cancel(self, job_ids: Sequence[str]) -> tuple[Command, ...]:
        """Return the commands that end these jobs and elements, pending or running: as few as are safe."""

    def read_cancel(self, result: Result) -> bool:
        """Return False when a job was gone or ending already; the others of the command are ended all the same."""

    def force(self, result: Result) -> Command | None:
        """Return what ends a job that ``cancel`` could not, for its node does not answer; None where that was not it.

        The result names one such job at a time: ``cancel`` is to be tried again.
        """


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
