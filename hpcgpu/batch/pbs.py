"""OpenPBS and PBS Pro: qsub, qstat, qdel. Read on recordings of two builds (tests/data/batch/pbs)."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from hpcgpu.batch.text import Directive, body, merge, options_in, refuse_control
from hpcgpu.errors import ConfigError, SubmitError
from hpcgpu.model import Command, JobSpec, JobState, JobStatus, Result
from hpcgpu.units import format_duration

STATES: Mapping[str, JobState] = MappingProxyType(
    {
        **dict.fromkeys("QWTM", JobState.PENDING),
        **dict.fromkeys("H", JobState.HELD),
        **dict.fromkeys("RBE", JobState.RUNNING),
        **dict.fromkeys("SU", JobState.SUSPENDED),
        **dict.fromkeys("FX", JobState.ENDED),
    }
)
_ID = r"\d+(?:\[\d*\])?\.[\w.-]+"
# qstat's JSON is read line by line, since it is not always JSON: a bare nan or .5 anywhere in a job, one byte
# that is no UTF-8, an empty value that takes in the next (16-json-quirks, 18-json-values; OpenPBS 23.06.06).
_HEADER = re.compile(rf'[ \t]*"({_ID})"\s*:\s*{{\s*')
_FIELD = re.compile(r'([ \t]*)"([^"]*)"\s*:\s*(.*?),?\s*')
_ENDED = re.compile(rf"Unknown Job Id ({_ID})|({_ID}) Job has finished")
_GONE = re.compile(r"Unknown Job Id|Job has finished", re.IGNORECASE)
_NO_HISTORY = "not configured to maintain job history"
# Exit codes are PBSE & 255: a user's limit of jobs (38) or of a resource (39), no connection (162; qstat 255).
_TRANSIENT = frozenset({38, 39, 124, 162, 255})
# What no tool of PBS splits or reads in another way; values of our own options only.
_PLAIN = re.compile(r"[\w.:/+=@%~^\[\]-]+")


@dataclass(frozen=True, slots=True)
class Pbs:
    """How this site's PBS is spoken to.

    Attributes
    ----------
    gpus : str
        The chunk's resource for GPUs: ``ngpus``, ``gpus``, or ``none`` where nodes come whole.
    mpiprocs : bool
        Whether chunks may say ``mpiprocs`` (and ``ncpus`` for the ranks).
    place : str
        Placement; without ``scatter`` two chunks may be put on one node.
    resources : str
        More of the chunk, ``system=polaris``.
    launcher : tuple of str
        argv words that start the ranks here, for who makes the job's command.

    """

    gpus: str = "ngpus"
    mpiprocs: bool = True
    place: str = "scatter"
    resources: str = ""
    launcher: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.gpus not in ("ngpus", "gpus", "none"):
            raise ConfigError(f"gpus={self.gpus!r} of PBS; allowed: ngpus, gpus, none")

    def script(self, spec: JobSpec) -> str:
        """Return the job script; see :class:`hpcgpu.batch.BatchSystem`."""
        ours = [Directive(k, f"{k}{'=' if ' ' in k else ' '}{_plain(k, v)}") for k, v in self._options(spec) if v]
        extra = [d for text in spec.extra_directives for d in _extra(text)]
        kept = merge(ours, extra, spec.skipped_directives, _keys)
        # A job of PBS starts in the home folder, one of Slurm where it was submitted.
        start = ('cd -- "${PBS_O_WORKDIR:-.}"',)
        return "\n".join(["#!/bin/bash", *(f"#PBS {d.text}" for d in kept), "", *body(spec, start)])

    def log(self, spec: JobSpec, job_id: str) -> str:
        """Return the path of the job's output, once the job has ended."""
        if spec.log_directory:
            return f"{spec.log_directory}/{job_id}.OU"
        return f"{spec.name}.o{job_id.partition('.')[0]}"

    def submit(self, script: str, spec: JobSpec) -> Command:
        """Return the qsub that reads the script from its standard input."""
        return Command(("qsub",), stdin=script)

    def read_submit(self, result: Result) -> str:
        """Return the job id, or raise SubmitError in qsub's words."""
        found = re.findall(rf"^\s*({_ID})\s*$", result.stdout, re.M)
        if result.returncode == 0 and found:
            return str(found[-1])
        raise _refused("qsub refused the job", result)

    def status(self, job_ids: Sequence[str]) -> Command:
        """Return one qstat for all. Not ``-x``: without job history, PBS's default, it lists no job at all."""
        return Command(("qstat", "-f", "-F", "json", *job_ids))

    def history(self, job_ids: Sequence[str]) -> Command:
        """Return the qstat for jobs that have ended; without job history it lists none."""
        return Command(("qstat", "-x", "-f", "-F", "json", *job_ids))

    def read_status(self, result: Result) -> Mapping[str, JobStatus]:
        """Return what qstat lists, and as ended those that it says are gone.

        A job that is in neither may be alive: OpenPBS of 2026-04 drops every job after an unknown one.
        """
        out = {}
        for job_id, fields in _jobs(result.stdout):
            native = fields.get("job_state", "")
            state = STATES.get(native, JobState.UNKNOWN)
            # A running job may carry the status of its first life, a queued one that of its array.
            code = _exit_code(fields.get("Exit_status", "")) if state is JobState.ENDED else None
            out[job_id] = JobStatus(state, native, fields.get("comment", ""), code)
        for line in result.stderr.splitlines():
            if found := _ENDED.search(line):
                out.setdefault(found[1] or found[2], JobStatus(JobState.ENDED, "", line.strip()))
        if result.returncode != 0 and not out and not _GONE.search(result.stderr):
            raise _refused("qstat did not answer", result)
        return out

    def onto(self, job_id: str, node: str, argv: tuple[str, ...]) -> tuple[str, ...]:
        """Return an ssh: PBS has no command for it that works from a login node."""
        return ("ssh", "-o", "BatchMode=yes", node, shlex.join(argv))

    def cancel(self, job_id: str) -> Command:
        """Return the qdel of one job: a queued and an unknown id in one qdel end pbs_server (SIGSEGV, 23.06.06)."""
        return Command(("qdel", job_id))

    def read_cancel(self, result: Result) -> bool:
        """Return False when the job was gone already; raise SubmitError in qdel's words."""
        gone = bool(_GONE.search(result.stderr))
        if result.returncode != 0 and not gone:
            raise _refused("qdel failed", result)
        return not gone

    def _options(self, spec: JobSpec) -> list[tuple[str, str | None]]:
        if spec.log_directory and ":" in spec.log_directory:
            raise ConfigError(f"log_directory={spec.log_directory!r}: PBS takes what is before a colon for a host")
        return [
            ("-N", spec.name),
            ("-q", spec.queue),
            ("-A", spec.account),
            ("-l select", self._select(spec)),
            ("-l place", self.place),
            ("-l walltime", None if spec.walltime_s is None else format_duration(spec.walltime_s)),
            ("-j", "oe"),
            ("-o", f"{spec.log_directory}/" if spec.log_directory else None),
        ]

    def _select(self, spec: JobSpec) -> str:
        cpus = None if spec.cpus_per_task is None else spec.cpus_per_task * spec.tasks_per_node
        if cpus is None and self.mpiprocs:
            cpus = spec.tasks_per_node  # PBS would give one core to all ranks of the node
        memory = spec.memory_per_node_bytes
        parts = [
            str(spec.nodes),
            f"ncpus={cpus}" if cpus else "",
            f"mpiprocs={spec.tasks_per_node}" if self.mpiprocs else "",
            f"{self.gpus}={spec.gpus_per_node}" if spec.gpus_per_node and self.gpus != "none" else "",
            "" if memory is None else f"mem={-(-memory // 2**20)}mb",
            self.resources,
        ]
        return ":".join(part for part in parts if part)


def _jobs(text: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield each job's id and its own fields; those of its environment stand further in."""
    job_id, indent, fields = "", "", dict[str, str]()
    for line in text.splitlines():
        if found := _HEADER.fullmatch(line):
            if job_id:
                yield job_id, fields
            job_id, indent, fields = found[1], "", {}
        elif job_id and (found := _FIELD.fullmatch(line)):
            indent = indent or found[1]
            if found[1] == indent:
                fields.setdefault(found[2], _text(found[3]))
    if job_id:
        yield job_id, fields


def _text(value: str) -> str:
    if len(value) < 2 or value[0] != '"':
        return value
    try:
        return str(json.loads(value, strict=False))
    except ValueError:
        return value[1:-1]


def _exit_code(text: str) -> int | None:
    """Return the exit code as a shell says it: PBS's 271 is SIGTERM, 143. Below zero PBS ended it (-29: walltime)."""
    if not re.fullmatch(r"-?\d+", text):
        return None
    return int(text) - 128 if int(text) > 256 else int(text)


def _plain(option: str, value: str) -> str:
    refuse_control(value, f"PBS option {option}")
    if option in ("-N", "-q", "-A", "-o") and not _PLAIN.fullmatch(value):
        raise ConfigError(
            f"PBS option {option} cannot carry {value!r}; allowed: letters, digits and . : / + = @ % ~ ^ - _"
        )
    return value


def _extra(text: str) -> Iterator[Directive]:
    """Yield the user's options, each resource of ``-l`` and ``-W`` for itself: a script may have many of these."""
    for option, value in options_in(text):
        if value is None:
            yield Directive(option, option)
        elif option in ("-l", "-W"):
            for part in _parts(value):
                yield Directive(f"{option} {part.partition('=')[0]}", f"{option} {_quoted(part)}")
        else:
            yield Directive(option, f"{option} {_quoted(value)}")


def _parts(value: str) -> list[str]:
    """Split ``walltime=1:00:00,place=free``; a comma also stands inside values, as in ``afterok:1,after:2``."""
    return re.split(r",(?=\w+=)", value)


def _quoted(value: str) -> str:
    return f'"{value}"' if re.search(r"\s", value) else value


def _keys(text: str) -> set[str]:
    return {directive.key for directive in _extra(text)}


def _refused(what: str, result: Result) -> SubmitError:
    said = result.stderr.strip() or result.stdout.strip()
    words = said.partition("\nusage:")[0] or f"exit code {result.returncode}, and no word"
    return SubmitError(f"{what}: {words}", evidence=said, transient=result.returncode in _TRANSIENT)
