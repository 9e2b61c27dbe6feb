"""OpenPBS and PBS Pro: qsub, qstat, qdel. Tested on recordings of two builds (tests/data/batch/pbs).

Together: what it writes and reads of PBS has the same versions and recordings.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from hpcgpu.batch.batch_system import BatchSystem, by_array, index_runs, last_of, limit_s
from hpcgpu.batch.job_script import NUMBER_OF_JOBS, Directive, exit_file, merge_options, options_in, script_body
from hpcgpu.batch.qstat import ID, hosts, list_jobs, moment, read_job, whole
from hpcgpu.errors import ConfigError, SubmitError, opt, plain
from hpcgpu.model import Command, JobSpec, JobState, JobStatus, Result
from hpcgpu.model.allocation import JOB_RESTARTS
from hpcgpu.model.site import PbsDialect
from hpcgpu.units import format_duration

# How many of the mark's 16 hexadecimal digits a name has; qstat shows 16 characters of a name.
_MARK = 8
_REFUSED = MappingProxyType(
    {
        "-J": NUMBER_OF_JOBS,
        "-I": "an interactive job has no script; in one, hpcgpu launch starts the ranks",
        "-W block": "qsub would answer when the job has ended, and is ended after a minute",
        "-z": "qsub would not say the job's id",
    }
)
# Characters that qsub takes and that no tool of PBS misreads: tried one by one (23.06.06). A colon is refused in a
# name, and the part after the @ of a queue is a server.
_ACCOUNT = (re.compile(r"[\w.:/+=@%~^\[\]-]+"), "letters, digits and . : / + = @ % ~ ^ - _")
_CARRIES: Mapping[str, tuple[re.Pattern[str], str]] = MappingProxyType(
    {
        "-N": (re.compile(r"[\w.+-]+", re.ASCII), "ASCII letters, digits and . + - _"),
        "-q": (re.compile(r"[\w.@:-]+", re.ASCII), "ASCII letters, digits and . @ : - _"),
        **dict.fromkeys(("-A", "-P"), _ACCOUNT),
        "-o": (re.compile(r"[\w./+=@%~^\[\]-]+", re.ASCII), "ASCII letters, digits and . / + = @ % ~ ^ - _"),
    }
)
_SETTINGS = MappingProxyType({"-N": "job_name", "-q": "queue", "-A": "account", "-P": "account", "-o": "log_directory"})
_LONGEST_NAME = 230
_ELEMENT = re.compile(r"(\d+\[)(\d+)(\]\..+)")
_UNKNOWN = re.compile(rf"Unknown Job Id ({ID})")
_GONE = re.compile(r"Unknown Job Id|Job has finished", re.IGNORECASE)
# qdel's message for a job in its epilogue or in E (run/56, run/64), and for an element that is X while its array lives
# (exit code 55, 23.06.06): it ends, or has ended, by itself.
_ENDING = re.compile(r"Request invalid for (state of job|finished array subjob)")
# A range is deleted as a whole, and the first element whose node does not answer is named (run/53, run/63).
_NO_NODE = re.compile(rf"Server could not connect to MOM ({ID})")
# Of pbsnodes -F json; a state is a list, "down,job-exclusive" (run/50, run/66).
_NODE = re.compile(r'[ \t]*"([\w.-]+)"\s*:\s*{\s*')
_NODE_STATE = re.compile(r'[ \t]*"state"\s*:\s*"([\w,-]+)",?\s*')
_AWAY = frozenset({"down", "stale", "state-unknown"})
# Exit codes are PBSE & 255: a user's limit of jobs (38) or of a resource (39), no connection (162; qstat 255), and one
# that ended before the answer came (183: "Batch Protocol error" in pbs_error.h; not seen).
_TRANSIENT = frozenset({38, 39, 124, 162, 183, 255})
_OVER_LIMIT = frozenset({38, 39})
_TOO_LARGE = "Array job exceeds server or queue size limit"  # exit code 3, that of other refusals, too (run/70)
# With this message no job was submitted (33-server-trouble); with any other it may have been. A busy server refuses
# pbs_iff (15007, exit code 159), or connections (15010); an unknown name has no server (15008, 02-qsub-bad-queue).
_UNSENT = "cannot connect to server"
_BUSY = re.compile(rf"{_UNSENT} .*errno=150(07|10)")
# A server that hangs does not answer (33-server-trouble), and this job's ranks wait meanwhile.
_TIMEOUT_S = 10.0
_CHUNK = re.compile(r"\(([^()]*)\)")
_MEM = re.compile(r":mem=([^:+]+)")
_SIZE = re.compile(r"(\d+)([kmgtp]?)([bw]?)", re.IGNORECASE)


def option_names(text: str) -> set[str]:
    """Return the names of a user's options: ``-l select``, ``-q``."""
    return {directive.key for directive in _extra(text)}


def marked_name(name: str, mark: str) -> str:
    """Return a job's name with part of the mark: PBS cannot select jobs by anything else that hpcgpu sets."""
    return f"{name}-{mark[-_MARK:]}" if mark else name


def _plain(option: str, value: str) -> str:
    if option not in _CARRIES:
        return value
    pattern, allowed = _CARRIES[option]
    if not pattern.fullmatch(value):
        raise ConfigError(f"{_SETTINGS[option]}: PBS option {option} cannot carry {value!r}; allowed: {allowed}")
    if option == "-N" and len(value) > _LONGEST_NAME:
        raise ConfigError(
            f"{opt('job_name', None)}: {value[:20]!r}... makes a name of {len(value)} characters; allowed: 230"
        )
    return value


def _extra(text: str) -> Iterator[Directive]:
    """Yield the user's options, each resource of ``-l`` and ``-W`` separately: a script may have several."""
    for option, value in options_in(text):
        if value is None:
            yield Directive(option, option)
        elif option in ("-l", "-W"):
            # walltime=1:00:00,place=free; a comma is also inside values, as in afterok:1,after:2.
            for part in re.split(r",(?=\w+=)", value):
                yield Directive(f"{option} {part.partition('=')[0]}", f"{option} {_quoted(part)}")
        else:
            yield Directive(option, f"{option} {_quoted(value)}")


def _quoted(value: str) -> str:
    return f'"{value}"' if re.search(r"\s", value) else value


@dataclass(frozen=True, slots=True)
class Pbs(PbsDialect, BatchSystem):
    """PBS in the dialect of a site."""

    # options that the site refuses, each with its rule
    forbidden: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def script(self, spec: JobSpec) -> str:
        options = [f"#PBS {directive.text}" for directive in self._kept(spec)]
        # A job of PBS starts in the home folder, one of Slurm where it was submitted.
        start = ['cd -- "${PBS_O_WORKDIR:-.}" || echo "this job goes on in $PWD" >&2']
        if spec.exit_file:  # count the job's starts: PBS requeues jobs without telling them their run_count
            ended = exit_file(spec, "PBS_ARRAY_INDEX")
            count = f"$(($(wc -l < {ended}.starts) - 1))"
            start.append(f"rm -f {ended}; (umask 77; echo >> {ended}.starts); export {JOB_RESTARTS}={count}")
        return "\n".join(["#!/bin/bash", *options, "", *script_body(spec, tuple(start), "PBS_ARRAY_INDEX")])

    def log(self, spec: JobSpec, job_id: str) -> str:
        """Return the path of the job's output; without ``direct_output`` it exists when the job has ended.

        If the user's options keep the errors apart, theirs is it: hpcgpu's own lines and tracebacks are there.
        """
        options = {d.key: d.text.removeprefix(d.key).strip(' "') for d in self._kept(spec)}
        kind = "o" if options.get("-j") == "oe" else "e"
        path = options.get(f"-{kind}", "").rpartition(":")[2]
        if path.endswith("/"):
            return f"{path}{job_id}.{'OU' if kind == 'o' else 'ER'}"
        number, _, index = job_id.partition(".")[0].removesuffix("]").partition("[")
        if path:  # without the index all elements of an array have one file (23.06.06)
            return path.replace("^array_index^", index) if index else path
        name = options.get("-N", marked_name(spec.name, spec.mark))
        return f"{name}.{kind}{number}{'.' if index else ''}{index}"

    def submit(self, script: str, spec: JobSpec) -> Command:
        # With -f qsub submits in the foreground. Else a background process does (seen on 23.06.06), which would not
        # end with a qsub that is killed for taking too long.
        # By the user's PBS_DPREFIX qsub would read no directive, by PBS_SHELL take another shell than bash (23.06.06).
        return Command(("qsub", "-f"), stdin=script, without=frozenset(("PBS_DPREFIX", "PBS_SHELL")))

    def read_submit(self, result: Result) -> str:
        ids = re.findall(rf"^\s*({ID})\s*$", result.stdout, re.M)
        if result.returncode != 0:
            raise _refused("qsub refused the job", result, result.output)
        return last_of(ids, "qsub", result)

    def find(self, name: str, mark: str) -> Command | None:
        """Return the qselect for the name, which contains the mark; it lists no ended job."""
        return Command(("qselect", "-N", marked_name(name, mark)))

    def read_found(self, result: Result, mark: str) -> tuple[str, ...]:
        """Return the ids; an array has one id (``123[].server``, run/d1-qselect) for all of its elements."""
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
        """Parse qstat's output; jobs that it does not know, and the elements of such arrays, have ended.

        A job that "has finished" is left to the history, which has its exit code and reason. A job that is neither
        listed nor unknown may be alive: OpenPBS of 2026-04 drops all jobs after an unknown one.
        """
        out, gone = dict[str, JobStatus](), dict[str, JobStatus]()
        held = set[str]()
        for job_id, fields in list_jobs(result.stdout):
            if "[]" in job_id and fields.get("job_state") == "H":
                held.add(job_id)
            if "[]" not in job_id:
                out[job_id] = read_job(fields, array_is_held=whole(job_id) in held)
        for line in result.stderr.splitlines():
            if match := _UNKNOWN.search(line):
                gone.setdefault(match[1], JobStatus(JobState.ENDED, "", line.strip()))
        # Only here the state of an array says that of an element; the array of a running one is B, or F with 1.
        over = {job_id: gone[array] for job_id in job_ids if (array := whole(job_id)) in gone}
        if result.returncode != 0 and not out and not gone and not _GONE.search(result.stderr):
            raise _refused("qstat did not answer", result)
        return out | {job_id: s for job_id, s in (gone | over).items() if job_id not in out}

    def nodes(self, hosts: Sequence[str]) -> Command | None:
        """Return the pbsnodes for these nodes: a job on a lost node stays R (run/50)."""
        return Command(("pbsnodes", "-F", "json", *hosts))

    def read_nodes(self, result: Result) -> Mapping[str, str]:
        """Return the state of nodes that do not answer the server; empty if pbsnodes itself did not answer."""
        troubles, node = dict[str, str](), ""
        for line in result.stdout.splitlines():
            if header := _NODE.fullmatch(line):
                node = header[1]
            elif (state := _NODE_STATE.fullmatch(line)) and not _AWAY.isdisjoint(state[1].split(",")):
                troubles[node] = f"{node} is {state[1]}"
        return troubles

    def onto(self, job_id: str, node: str, argv: tuple[str, ...]) -> tuple[str, ...]:
        """Return an ssh: PBS has no such command for login nodes."""
        return ("ssh", "-o", "BatchMode=yes", node, shlex.join(argv))

    def cancel(self, job_ids: Sequence[str]) -> tuple[Command, ...]:
        """Return a qdel for each job, and for each contiguous range of an array's elements."""
        groups = by_array(job_ids, _ELEMENT).items()
        ids = [f"{a}{run}{z}" for (a, z), indexes in groups for run in index_runs(indexes) or ("",)]
        # a queued and an unknown id in one qdel end pbs_server (SIGSEGV, 23.06.06; recording 17)
        return tuple(Command(("qdel", word)) for word in ids)

    def read_cancel(self, result: Result) -> bool:
        over = bool(_GONE.search(result.stderr) or _ENDING.search(result.stderr))
        if result.returncode != 0 and not over:
            raise _refused("qdel failed", result)
        return not over

    def force(self, result: Result) -> Command | None:
        """Return the ``qdel -W force`` for the job whose node did not answer a qdel; its owner may use it."""
        match = _NO_NODE.search(result.stderr) if result.returncode != 0 else None
        return Command(("qdel", "-W", "force", match[1])) if match else None

    def grace(self, job_id: str) -> tuple[Command, ...]:
        return (ask_memory(job_id), Command(("qstat", "-Q", "-f", "-F", "json")))

    def read_killed_s(self, results: Sequence[Result], came_s: float) -> float:
        """Return the end of the kill_delay of the job's queue, if it has one: PBS's own is 10 s."""
        job, queues = results
        _, fields = next(list_jobs(job.stdout), ("", dict[str, str]()))
        with contextlib.suppress(ValueError, KeyError, TypeError):
            return came_s + float(json.loads(queues.stdout)["Queue"][fields["queue"]]["kill_delay"])
        return came_s

    def requeue(self, job_id: str) -> Command:
        return Command(("qrerun", job_id))

    def read_requeue(self, result: Result) -> None:
        """Raise SubmitError in qrerun's words: it is for operators, unless a site's wrapper lets users do it."""
        if result.returncode != 0:
            raise _refused("qrerun does not requeue the job", result)

    def resubmit(self, result: Result, job_id: str) -> Command | None:
        """Return the qsub of a job whose script was a file: qstat has its arguments, without their quotes."""
        _, fields = next(list_jobs(result.stdout), ("", dict[str, str]()))
        folder, arguments = fields.get("Variable_List.PBS_O_WORKDIR", ""), fields.get("Submit_arguments", "").split()
        if not folder or not arguments:
            return None
        script = arguments[-1] if arguments[-1].startswith("/") else f"{folder}/{arguments[-1]}"
        depend = ("-W", f"depend=afterany:{job_id}")  # until then the folder of a checkpoint has its owner
        return Command(("env", "-C", folder, "qsub", *depend, *arguments[:-1], script))

    def _kept(self, spec: JobSpec) -> list[Directive]:
        ours = [Directive(k, f"{k}{'=' if ' ' in k else ' '}{_plain(k, v)}") for k, v in self._options(spec) if v]
        extra = [d for text in spec.extra_directives for d in _extra(text)]
        return merge_options(ours, extra, spec.skipped_directives, option_names, _REFUSED, self.forbidden)

    def _options(self, spec: JobSpec) -> list[tuple[str, str | None]]:
        if spec.log_directory and ":" in spec.log_directory:
            raise ConfigError(
                f"{opt('log_directory', spec.log_directory)}: PBS takes what is before a colon for a host"
            )
        return [
            ("-N", marked_name(spec.name, spec.mark)),
            ("-J", f"0-{spec.count - 1}" if spec.count > 1 else None),
            ("-q", spec.queue),
            (self.account, spec.account),
            *self._resources(spec),
            ("-l walltime", None if spec.walltime_s is None else format_duration(spec.walltime_s)),
            ("-j", "oe"),
            # A node that cannot write there keeps the output as without -k (23.06.06).
            ("-k", "doe" if self.direct_output else None),
            ("-o", f"{spec.log_directory}/" if spec.log_directory else None),
        ]

    def notes(self, spec: JobSpec) -> tuple[str, ...]:
        """Return messages on requests so small that they may be mistakes, and on parts that cannot be requested."""
        vain = BatchSystem.notes(self, spec)  # no super() in a class with slots that a decorator has made anew
        options = {key for text in (*spec.extra_directives, *spec.skipped_directives) for key in option_names(text)}
        if self.gpus == "none" or not spec.gpus_per_node or options & {"-l select", "-l"}:
            return vain
        cores = self.cpus and spec.cpus_per_task is None and self.cpus_multiple_of == 1 and "-l ncpus" not in options
        memory = self.memory == "mem" and spec.memory_per_node_bytes is None and "-l mem" not in options
        asks = (
            *([f"one core for each rank ({opt('cores_per_gpu')} asks for more)"] if cores else []),
            *([f"no memory, which may be 256 MB where PBS limits it ({opt('memory')} asks for it)"] if memory else []),
        )
        return (*vain, *([plain(f"it asks PBS for {' and for '.join(asks)}")] if asks else []))

    def _resources(self, spec: JobSpec) -> list[tuple[str, str | None]]:
        memory = spec.memory_per_node_bytes if self.memory == "mem" else None
        gpus = spec.gpus_per_node if self.gpus != "none" else 0
        if spec.queue in self.gpu_chunks:
            if spec.nodes > 1:
                raise ConfigError(
                    f"{opt('nodes', spec.nodes)}, but a job of queue {spec.queue} is GPUs of one node: take another "
                    f"{opt('queue')} for more, or {opt('nodes', 1)}"
                )
            chunks = filter(None, (str(spec.gpus_per_node or spec.tasks_per_node), self.resources))
            return [("-l select", ":".join(chunks))]
        each = {
            "ncpus": str(self._cpus(spec) or ""),
            "mpiprocs": str(spec.tasks_per_node) if self.mpiprocs else "",
            self.gpus: str(gpus or ""),
            "mem": "" if memory is None else f"{-(-memory // 2**20)}mb",
        }
        if self.select:
            parts = (str(spec.nodes), *(f"{name}={value}" for name, value in each.items() if value), self.resources)
            return [("-l select", ":".join(part for part in parts if part)), ("-l place", self.place)]
        del each["mpiprocs"]
        more = [(f"-l {name}", value) for name, _, value in (p.partition("=") for p in self.resources.split(":"))]
        totals = ((name, re.fullmatch(r"(\d+)(\D*)", value)) for name, value in each.items())
        return [*((f"-l {name}", f"{int(v[1]) * spec.nodes}{v[2]}") for name, v in totals if v), *more]

    def _cpus(self, spec: JobSpec) -> int:
        """Return the cores of a node; 0: not requested, and PBS gives one core to all ranks of the node."""
        count = (spec.cpus_per_task or 1) * spec.tasks_per_node
        if not self.cpus or (spec.cpus_per_task is None and not self.mpiprocs and self.select):
            return 0
        unit = self.cpus_multiple_of * max(1, spec.gpus_per_node)
        return -(-count // unit) * unit if self.cpus_multiple_of > 1 else count


def _jobs(job_ids: Sequence[str]) -> tuple[str, ...]:
    """Return qstat's arguments for these jobs; an array is asked for as a whole, with ``-t`` for its elements."""
    words = [f"{a}{z}" for a, z in by_array(job_ids, _ELEMENT)]
    return (*(("-t",) if any("[]" in word for word in words) else ()), "-f", "-F", "json", *words)


def _refused(problem: str, result: Result, message: str = "") -> SubmitError:
    """Return the error for a program's failure, with its message."""
    message, over_limit = message or result.message, result.returncode in _OVER_LIMIT
    transient = result.returncode in _TRANSIENT or bool(_BUSY.search(message))
    unsure = transient and not over_limit and _UNSENT not in message
    doubts = {"transient": transient, "over_limit": over_limit, "unsure": unsure, "over_size": _TOO_LARGE in message}
    return SubmitError(f"{problem}: {message}", evidence=message, **doubts)


# --- the memory that PBS has granted a job: no variable in the job has it. The cgroups hook, if a site has it, enforces
# this limit on each node; otherwise nothing does.


def ask_memory(job_id: str) -> Command:
    """Return the qstat for one running job, which may be an array's element."""
    return Command(("qstat", "-f", "-F", "json", job_id), timeout_s=_TIMEOUT_S)


def read_memory(result: Result) -> Mapping[str, int]:
    """Return the granted bytes of each host, 0 for a host without; empty if no host has any. Raises SubmitError."""
    _, fields = next(list_jobs(result.stdout), ("", None))
    if fields is None:
        raise SubmitError(f"qstat did not answer: {result.message}", evidence=result.message)
    host_names = hosts(fields)
    chunks = _CHUNK.findall(fields.get("exec_vnode", ""))
    if not host_names or len(host_names) != len(chunks):
        return {}
    granted = dict.fromkeys(host_names, 0)
    # a host may have several chunks, and a chunk several vnodes of its host, with other names
    for host, chunk in zip(host_names, chunks, strict=True):
        granted[host] += sum(map(size_bytes, _MEM.findall(chunk)))
    if not any(granted.values()):  # memory of the whole job, by resources_default.mem, is in no chunk
        granted = dict.fromkeys(granted, size_bytes(fields.get("Resource_List.mem", "")) // len(granted))
    return granted if any(granted.values()) else {}


def read_restarts(result: Result) -> int:
    """Return how often the job was started before."""
    _, fields = next(list_jobs(result.stdout), ("", dict[str, str]()))
    return max(int(fields.get("run_count", "1")) - 1, 0)


def read_end_s(result: Result, now_s: float) -> int | None:
    """Return when the job's time ends, in seconds since the epoch; None without a walltime."""
    _, fields = next(list_jobs(result.stdout), ("", dict[str, str]()))
    time_s, start = limit_s(fields.get("Resource_List.walltime", "")), moment(fields.get("stime", ""))
    return time_s and time_s + int(start.timestamp() if start else now_s)  # a cache may not know yet that it runs


def size_bytes(text: str) -> int:
    """Return the bytes of a PBS size, ``2097152kb``; 0 if invalid. Units are powers of 1024, a word has 8 bytes."""
    match = _SIZE.fullmatch(text)
    if not match:
        return 0
    power = " kmgtp".index(match[2].lower() or " ")
    return (int(match[1]) << 10 * power) * (8 if match[3] in ("w", "W") else 1)
