"""OpenPBS and PBS Pro: qsub, qstat, qdel. Read on recordings of two builds (tests/data/batch/pbs)."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from hpcgpu.batch import arrays
from hpcgpu.batch.qstat import ID, listed, moment
from hpcgpu.batch.text import Directive, body, exit_file, merge, options_in, refuse_control
from hpcgpu.errors import ConfigError, SubmitError
from hpcgpu.model import Command, JobSpec, JobState, JobStatus, Result
from hpcgpu.model.allocation import JOB_RESTARTS
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
_ELEMENT = re.compile(r"(\d+\[)(\d+)(\]\..+)")
_UNKNOWN = re.compile(rf"Unknown Job Id ({ID})")
# The second after 21 of them, in a hold that only an operator can release (37-held-too-many-attempts).
_STUCK = re.compile("Can Never Run|job held, too many failed attempts to run")
_GONE = re.compile(r"Unknown Job Id|Job has finished", re.IGNORECASE)
_NO_HISTORY = "not configured to maintain job history"
# Exit codes are PBSE & 255: a user's limit of jobs (38) or of a resource (39), no connection (162; qstat 255), and one
# that ended before the answer came (183: "Batch Protocol error" in pbs_error.h; not seen).
_TRANSIENT = frozenset({38, 39, 124, 162, 183, 255})
_OVER_LIMIT = frozenset({38, 39})
# In these words no job has been handed over (33-server-trouble); in any other it may have been.
_UNSENT = "cannot connect to server"
# Of 16 hexadecimal digits that tell runs apart; qstat shows 16 characters of a name.
_MARK = 8
_REFUSED = MappingProxyType(
    {
        "-J": "how many jobs there are is said by nodes=, or by scale() with shape='elastic'",
        "-I": "an interactive job has no script; in one, hpcgpu launch starts the ranks",
        "-W block": "qsub would answer when the job has ended, and is ended after a minute",
        "-z": "qsub would not say the job's id",
    }
)
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
    array_limit : int
        The most elements of one array: the server's max_array_size, 10000 by default.

    """

    gpus: str = "ngpus"
    mpiprocs: bool = True
    place: str = "scatter"
    resources: str = ""
    launcher: tuple[str, ...] = ()
    array_limit: int = 10000

    def __post_init__(self) -> None:
        if self.gpus not in ("ngpus", "gpus", "none"):
            raise ConfigError(f"gpus={self.gpus!r} of PBS; allowed: ngpus, gpus, none")
        arrays.check_limit(self.array_limit, "PBS")

    def split(self, count: int) -> tuple[int, ...]:
        """Return the sizes of the submissions for so many jobs; see :class:`hpcgpu.batch.BatchSystem`."""
        return arrays.split(count, self.array_limit)

    def script(self, spec: JobSpec) -> str:
        """Return the job script; see :class:`hpcgpu.batch.BatchSystem`."""
        ours = [Directive(k, f"{k}{'=' if ' ' in k else ' '}{_plain(k, v)}") for k, v in self._options(spec) if v]
        extra = [d for text in spec.extra_directives for d in _extra(text)]
        kept = merge(ours, extra, spec.skipped_directives, _keys, _REFUSED)
        # A job of PBS starts in the home folder, one of Slurm where it was submitted.
        start = ('cd -- "${PBS_O_WORKDIR:-.}"', *_counted(spec))
        return "\n".join(["#!/bin/bash", *(f"#PBS {d.text}" for d in kept), "", *body(spec, start, "PBS_ARRAY_INDEX")])

    def log(self, spec: JobSpec, job_id: str) -> str:
        """Return the path of the job's output, once the job has ended."""
        if spec.log_directory:
            return f"{spec.log_directory}/{job_id}.OU"
        number, _, index = job_id.partition(".")[0].removesuffix("]").partition("[")
        return f"{_marked(spec.name, spec.mark)}.o{number}{'.' if index else ''}{index}"

    def submit(self, script: str, spec: JobSpec) -> Command:
        """Return the qsub that reads the script from its standard input.

        With ``-f`` it does so itself. Else it has a process in the background do it (seen on 23.06.06), which would not
        end with a qsub that is killed for taking too long.
        """
        return Command(("qsub", "-f"), stdin=script)

    def read_submit(self, result: Result) -> str:
        """Return the job id, or raise SubmitError in qsub's words."""
        found = re.findall(rf"^\s*({ID})\s*$", result.stdout, re.M)
        if result.returncode == 0 and found:
            return str(found[-1])
        raise _refused("qsub refused the job", result)

    def find(self, name: str, mark: str) -> Command | None:
        """Return the qselect for the name that the mark is part of; it lists no job that has ended."""
        return Command(("qselect", "-N", _marked(name, mark)))

    def read_found(self, result: Result, mark: str) -> tuple[str, ...]:
        """Return the ids, that of an array (``123[].server``) for all of its elements.

        That they come back is seen in recordings 04, 29 and 39; what stands between them, and that arrays are among
        them, is only read in the manual (qselect(1B)).
        """
        if result.returncode != 0:
            raise _refused("qselect did not answer", result)
        return tuple(re.findall(rf"(?<!\S)({ID})(?:@\S+)?(?!\S)", result.stdout))

    def elements(self, job_id: str, count: int) -> tuple[str, ...]:
        """Return ``123[0].server``, ``123[1].server``, ...; the id itself if it is no array."""
        return tuple(job_id.replace("[]", f"[{i}]", 1) for i in range(count)) if count > 1 else (job_id,)

    def status(self, job_ids: Sequence[str]) -> Command:
        """Return one qstat for all. Not ``-x``: without job history, PBS's default, it lists no job at all."""
        return Command(("qstat", *_jobs(job_ids)))

    def history(self, job_ids: Sequence[str]) -> Command:
        """Return the qstat for jobs that have ended; without job history it lists none."""
        return Command(("qstat", "-x", *_jobs(job_ids)))

    def read_status(self, result: Result, job_ids: Sequence[str] = ()) -> Mapping[str, JobStatus]:
        """Return what qstat lists, and as ended those that it does not know, with them the elements of an array.

        One that "has finished" is left to :meth:`history`, which has its exit code and why. A job that is in neither
        may be alive: OpenPBS of 2026-04 drops every job after an unknown one.
        """
        out, gone = dict[str, JobStatus](), dict[str, JobStatus]()
        for job_id, fields in listed(result.stdout):
            if "[]" in job_id:
                continue
            native, comment = fields.get("job_state", ""), fields.get("comment", "")
            state = STATES.get(native, JobState.UNKNOWN)
            if state in (JobState.PENDING, JobState.HELD) and _STUCK.match(comment):
                state = JobState.STUCK
            # A running job may carry the status of its first life, a queued one that of its array.
            code = _exit_code(fields.get("Exit_status", "")) if state is JobState.ENDED else None
            starts = moment(fields.get("estimated.start_time", "")) if state is JobState.PENDING else ""
            out[job_id] = JobStatus(state, native, comment, code, starts)
        for line in result.stderr.splitlines():
            if found := _UNKNOWN.search(line):
                gone.setdefault(found[1], JobStatus(JobState.ENDED, "", line.strip()))
        # Only here the state of an array says that of an element; the array of a running one is B, or F with 1.
        over = {job_id: gone[array] for job_id in job_ids if (array := _whole(job_id)) in gone}
        if result.returncode != 0 and not out and not gone and not _GONE.search(result.stderr):
            raise _refused("qstat did not answer", result)
        return out | {job_id: s for job_id, s in (gone | over).items() if job_id not in out}

    def onto(self, job_id: str, node: str, argv: tuple[str, ...]) -> tuple[str, ...]:
        """Return an ssh: PBS has no command for it that works from a login node."""
        return ("ssh", "-o", "BatchMode=yes", node, shlex.join(argv))

    def cancel(self, job_ids: Sequence[str]) -> tuple[Command, ...]:
        """Return a qdel for each job and each range of an array's elements, without a hole.

        Never two ids in one: a queued and an unknown id together end pbs_server (SIGSEGV, 23.06.06; recording 17).
        """
        found = arrays.by_array(job_ids, _ELEMENT).items()
        words = [f"{a}{run}{z}" for (a, z), indexes in found for run in arrays.runs(indexes) or ("",)]
        return tuple(Command(("qdel", word)) for word in words)

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
            ("-N", _marked(spec.name, spec.mark)),
            ("-J", f"0-{spec.count - 1}" if spec.count > 1 else None),
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


def _marked(name: str, mark: str) -> str:
    """Return the name of a job: a name is all of ours that PBS can choose jobs by, so the mark's end is part of it."""
    return f"{name}-{mark[-_MARK:]}" if mark else name


def _counted(spec: JobSpec) -> tuple[str, ...]:
    """Return what counts the lives of a job, since PBS tells it its run_count nowhere: they are requeued by default."""
    if not spec.exit_file:
        return ()
    ended = exit_file(spec, "PBS_ARRAY_INDEX")
    starts = f"{ended}.starts"
    return (f"rm -f {ended}; echo >> {starts}; export {JOB_RESTARTS}=$(($(wc -l < {starts}) - 1))",)


def _jobs(job_ids: Sequence[str]) -> tuple[str, ...]:
    """Return qstat's words for these jobs; an array is asked for as a whole, with ``-t`` for its elements."""
    words = [f"{a}{z}" for a, z in arrays.by_array(job_ids, _ELEMENT)]
    return (*(("-t",) if any("[]" in word for word in words) else ()), "-f", "-F", "json", *words)


def _whole(job_id: str) -> str:
    """Return the id of an element's array; of another job its own."""
    return re.sub(r"\[\d+\]", "[]", job_id)


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
    transient, over_limit = result.returncode in _TRANSIENT, result.returncode in _OVER_LIMIT
    unsure = transient and not over_limit and _UNSENT not in said
    return SubmitError(f"{what}: {words}", evidence=said, transient=transient, over_limit=over_limit, unsure=unsure)
