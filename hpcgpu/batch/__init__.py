"""Batch systems: one module per system, each a pure value: floor 2. Commands go out, results come in.

To add one: a frozen class with the methods of :class:`BatchSystem` in its own module, and recordings of its programs'
output under ``tests/data/batch``. Readers of long outputs are in ``*_answers``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from types import MappingProxyType
from typing import Any, Protocol

from hpcgpu.batch.pbs import Pbs as Pbs
from hpcgpu.batch.slurm import Slurm as Slurm
from hpcgpu.errors import ConfigError
from hpcgpu.model import Command, JobSpec, JobStatus, Offer, Result


class BatchSystem(Protocol):
    """The questions to a batch system: for each one a command, and a method that parses its result.

    A ``read_`` method raises :class:`~hpcgpu.errors.SubmitError`, with the program's message, when the question itself
    failed; ``transient`` tells whether to ask again. An unknown state is ``UNKNOWN``, never an error.
    """

    def script(self, spec: JobSpec) -> str:
        """Return the job script: options, prologue, environment, and one quoted command whose exit code is the job's.

        Raises ConfigError if an option of the batch system cannot carry a value.
        """

    def log(self, spec: JobSpec, job_id: str) -> str:
        """Return the path of the job's output, relative to the folder of submission if no folder was given."""

    def notes(self, spec: JobSpec) -> tuple[str, ...]:
        """Return messages about such a request, for people."""

    def submit(self, script: str, spec: JobSpec) -> Command:
        """Return the command that submits the script, which it reads from its standard input."""

    def read_submit(self, result: Result) -> str:
        """Return the job id. After an error that is ``unsure`` the job may have been submitted nevertheless."""

    def find(self, name: str, mark: str) -> Command | None:
        """Return the command that lists the jobs with this name and mark; None if jobs have no mark."""

    def read_found(self, result: Result, mark: str) -> tuple[str, ...]:
        """Return the ids for a call of ``status``, which lists the elements of arrays and whether they have ended."""

    def split(self, count: int) -> tuple[int, ...]:
        """Return the sizes of the fewest submissions for ``count`` jobs that the site's array limit allows."""

    def elements(self, job_id: str, count: int) -> tuple[str, ...]:
        """Return the ids of the ``count`` jobs that were submitted as ``job_id``, by their index in the array."""

    def status(self, job_ids: Sequence[str]) -> Command:
        """Return one command that asks for all these jobs and elements; its length does not grow with the elements."""

    def history(self, job_ids: Sequence[str]) -> Command:
        """Return one command that asks for jobs that ``status`` no longer lists, or lists without their end."""

    def read_status(self, result: Result, job_ids: Sequence[str] = ()) -> Mapping[str, JobStatus]:
        """Parse the output of ``status`` or ``history``: elements instead of arrays, and perhaps other jobs.

        A job that is not listed is missing, not ended. ``job_ids`` are the jobs that were asked for: of an array that
        is gone the batch system lists no elements, but they have ended with it.
        """

    def offers(self, spec: JobSpec) -> Command | None:
        """Return the command that lists the nodes for such a job; None if it is not asked, or not compared."""

    def read_offers(self, result: Result) -> tuple[Offer, ...]:
        """Return the nodes of each kind and the limits; empty without an answer."""

    def test(self, script: str) -> Command | None:
        """Return the command that checks a script, which it reads from its standard input, and submits nothing."""

    def read_test(self, result: Result) -> str:
        """Return the expected start of such a job in the batch system's format; raise SubmitError if refused."""

    def nodes(self, hosts: Sequence[str]) -> Command | None:
        """Return the command that asks for the state of these nodes; None if there is only this machine."""

    def read_nodes(self, result: Result) -> Mapping[str, str]:
        """Return the trouble of each lost node; empty without an answer."""

    def onto(self, job_id: str, node: str, argv: tuple[str, ...]) -> tuple[str, ...]:
        """Return the command that runs ``argv`` on a node of a running job, its stdin and stdout connected."""

    def cancel(self, job_ids: Sequence[str]) -> tuple[Command, ...]:
        """Return the commands that end these jobs and elements, pending or running: as few as are safe."""

    def read_cancel(self, result: Result) -> bool:
        """Return False if a job was gone or ending already; the command's other jobs are ended nevertheless."""

    def force(self, result: Result) -> Command | None:
        """Return the command that ends a job whose node does not answer ``cancel``; None for other failures.

        The result names one such job at a time: try ``cancel`` again.
        """


SYSTEMS: Mapping[str, type[Slurm] | type[Pbs]] = MappingProxyType({"slurm": Slurm, "pbs": Pbs})


def get(name: str, **dialect: Any) -> BatchSystem:  # fields of the system's own class
    """Return the batch system ``name`` in the site's dialect (fields of its class); raise ConfigError if unknown."""
    system = SYSTEMS.get(name)
    if system is None:
        raise ConfigError(f"there is no batch system {name!r}; allowed: {', '.join(SYSTEMS)}")
    allowed = [f.name for f in fields(system) if f.name != "forbidden"]
    if unknown := next((key for key in dialect if key not in (*allowed, "forbidden")), None):
        raise ConfigError(f"{unknown!r} says nothing about {name}; allowed: {', '.join(allowed) or 'no field'}")
    return system(**dialect)
