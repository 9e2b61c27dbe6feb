"""Slurm: sbatch, squeue, sacct, sinfo, scancel. Recorded on 22.05.8, 24.11.5 and 26.05.5."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from types import MappingProxyType

from hpcgpu.batch.batch_system import BatchSystem, advice, by_array, index_runs, last_of, limit_s
from hpcgpu.batch.job_script import NUMBER_OF_JOBS, Directive, exit_file, merge_options, options_in, script_body
from hpcgpu.errors import ConfigError, HpcGpuError, SubmitError, opt
from hpcgpu.model import Command, JobSpec, JobState, JobStatus, Offer, Result
from hpcgpu.model.job import TIMED_OUT
from hpcgpu.model.site import SlurmDialect
from hpcgpu.units import format_duration

# AssocMaxSubmitJobLimit is not here: sites use it also for users without an account (CSC Roihu).
_TRANSIENT = re.compile(
    r"timed out|Unable to contact slurm controller|Connection refused|Connection reset|temporarily|Zero Bytes were|"
    r"standby mode|QOSMaxSubmitJob|QOSMaxJobs|Resource temporarily unavailable",
    re.IGNORECASE,
)
# With these messages no job was submitted; after another passing failure it may have been.
_UNSENT = re.compile(r"connect failure|Connection refused|standby mode|temporarily unable|QOSMax")
_OVER_LIMIT = re.compile(r"SubmitJobs?(?:Per\w+)?Limit")
_TOO_LARGE = "Invalid job array specification"
_GONE = re.compile(r"Invalid job id|already completing or completed", re.IGNORECASE)
_LONG = {
    **{"-A": "--account", "-a": "--array", "-b": "--begin", "-C": "--constraint", "-c": "--cpus-per-task"},
    **{"-D": "--chdir", "-d": "--dependency", "-e": "--error", "-F": "--nodefile", "-G": "--gpus", "-H": "--hold"},
    **{"-i": "--input", "-J": "--job-name", "-k": "--no-kill", "-L": "--licenses", "-M": "--clusters"},
    **{"-m": "--distribution", "-N": "--nodes", "-n": "--ntasks", "-O": "--overcommit", "-o": "--output"},
    **{"-p": "--partition", "-Q": "--quiet", "-q": "--qos", "-S": "--core-spec", "-s": "--oversubscribe"},
    **{"-t": "--time", "-W": "--wait", "-w": "--nodelist", "-x": "--exclude"},
}
_REFUSED = MappingProxyType(
    {
        "--array": NUMBER_OF_JOBS,
        "--wait": "sbatch would answer when the job has ended, and is ended after a minute",
        "--wrap": f"the job's command is the cluster's; {opt('job_script_prologue', None)} is for lines before it",
    }
)
# Options whose values are compared with the nodes; users may give them in other forms than hpcgpu.
_ASKED = {
    *("--partition", "--clusters", "--nodes", "--nodelist", "--constraint", "--reservation", "--qos", "--time"),
    *("--ntasks", "--ntasks-per-node", "--cpus-per-task", "--gres"),
}
# sbatch ranks its variables above the script (SBATCH_TIMELIMIT), and squeue filters by its own (SQUEUE_PARTITION;
# 22.05.8). Queries give all that they need as options.
_OF_QUERIES = frozenset(("SQUEUE_*", "SINFO_*", "SACCT_*", "SCANCEL_*", "SLURM_TIME_FORMAT"))
_VARIABLES = {  # those that are not named as their option
    "--time": "SBATCH_TIMELIMIT",
    "--array": "SBATCH_ARRAY_INX",
    "--mem": "SBATCH_MEM_PER_NODE",
    "--clusters": "SBATCH_CLUSTERS",
}
_RIVALS = (  # the options of a group replace each other, or are refused together
    ("--mem", "--mem-per-cpu", "--mem-per-gpu"),
    ("--gres", "--gpus", "--gpus-per-node", "--gpus-per-task", "--gpus-per-socket", "--tres-per-task"),
    ("--cpus-per-task", "--cpus-per-gpu", "--tres-per-task"),
)
# A user's options, those of hpcgpu with which sbatch refuses them or requests more (--gres=gpu:3 with --gpus-per-node=2
# is 3 for 22.05.8 and 24.11.5, and refused by 26.05.5), and what hpcgpu's follow from.
_COLLIDING = (
    (r"--gpus-per-task|--(gres|tres-per-task)=.*\bgpu\b", ("--gpus-per-node", "--gres", "--gpus"), "gpus_per_node"),
    (r"--cpus-per-gpu|--tres-per-task=.*\bcpu\b", ("--cpus-per-task",), "cores_per_gpu"),
    (r"--ntasks-per-gpu", ("--ntasks-per-node",), "workers_per_gpu"),
)
_NEVER = {"SBATCH_WAIT", "SBATCH_ARRAY_INX"}  # options that are refused, too
_NO_MORE = "squeue lists its array without it"
# sbatch: Job 12 to start at 2026-11-23T06:38:00 using 8 processors on nodes node[1-2] in partition main; 26.05.5 has
# another word, "a", behind the time
_TESTED = re.compile(r"to start at (\S+)(?: a)? using .* on nodes (\S+) in partition (\S+)")
_ELEMENT = re.compile(r"(\d+_)(\d+)()")
_PLAIN = re.compile(r"[\w.,:;/+=@%&|()\[\]*!~^-]+")

# The reason is the last field: it is the only one with free text. sacct, which is asked after the end, has no limit.
_COLUMNS = "TimeLimit:|,JobArrayID:|,State:|,exit_code:|,StartTime:|,NodeList:|,Reason:|"
_SACCT_COLUMNS = "JobID,State,ExitCode,Start,NodeList,Reason"
_FIELDS = 6
STATES: Mapping[str, JobState] = MappingProxyType(
    {
        **dict.fromkeys(("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED"), JobState.PENDING),
        **dict.fromkeys(("REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"), JobState.HELD),
        **dict.fromkeys(("RUNNING", "COMPLETING", "SIGNALING", "STAGE_OUT", "RESIZING"), JobState.RUNNING),
        **dict.fromkeys(("SUSPENDED", "STOPPED"), JobState.SUSPENDED),
        **dict.fromkeys(("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "DEADLINE"), JobState.ENDED),
        **dict.fromkeys(("NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED"), JobState.ENDED),
    }
)
_HELD = ("JobHeld", "job requeued in held state")
# A node could not start it; squeue of 22.05.8 writes this with spaces, scontrol with underscores.
_STUCK = re.compile("launch.failed.requeued.held")
_ID = re.compile(r"\d+(?:_\d+)?")
# A comma in brackets separates ranges, any other comma separates names.
_COMMA = re.compile(r",(?![^\[]*\])")
_RUNS = re.compile(r"([^\[]*)\[([^\]]*)\](.*)")
_NO_REASON = "none"
# Without --exact nodes of several kinds are one line, "8+" (sinfo(1), 22.05.8).
_OFFER_FIELDS = "%R|%P|%D|%l|%s|%c|%m|%G"
_LOWEST = (20, 11)  # the first with srun --overlap
_GPUS = re.compile(r"(?:^|,)gpu(?::([^:,()]+))?:(\d+)")


@dataclass(frozen=True, slots=True)
class Slurm(SlurmDialect, BatchSystem):
    """Slurm in the dialect of a site."""

    # options that the site refuses, each with its rule
    forbidden: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def script(self, spec: JobSpec) -> str:
        ours = [_directive(f"--{name}", value) for name, value in self._options(spec) if value is not None]
        ours += [Directive("--requeue", "--requeue")] if spec.requeue else []
        extra = [_directive(o, v) for text in spec.extra_directives for o, v in options_in(text)]
        kept = merge_options(ours, extra, spec.skipped_directives, _keys, _REFUSED, self.forbidden)
        _refuse_colliding(kept[: len(kept) - len(extra)], extra)
        index = "SLURM_ARRAY_TASK_ID"
        # of a start before: a requeued job waits for two minutes, and would be taken for one that has ended
        before = (f"rm -f {exit_file(spec, index)}",) if spec.exit_file else ()
        lines = script_body(spec, before, index)
        return "\n".join(["#!/bin/bash", *(f"#SBATCH {d.text}" for d in kept), "", *lines])

    def log(self, spec: JobSpec, job_id: str) -> str:
        options = {_LONG.get(o, o): v for text in spec.extra_directives for o, v in options_in(text)}
        pattern = options.get("--error") or options.get("--output")  # hpcgpu's lines and tracebacks are errors
        if not pattern:
            return f"{_folder(spec)}slurm-{job_id}.out"
        array, _, index = job_id.partition("_")
        values = {"%%": "%", "%A": array, "%a": index, "%x": options.get("--job-name") or spec.name}
        values["%j"] = "%j" if index else job_id  # of an element Slurm has another number
        return re.sub("%[%Aaxj]", lambda match: values[match[0]], pattern)

    def version(self) -> Command | None:
        return Command(("scontrol", "--version"), timeout_s=10.0)

    def read_version(self, result: Result) -> None:
        # slurm 25.05.3, Debian: slurm-wlm 22.05.8; a site's wrapper may print something else
        if (is_ := re.match(r"slurm\S* (\d+)\.(\d+)", result.stdout)) and (int(is_[1]), int(is_[2])) < _LOWEST:
            raise HpcGpuError(f"hpcgpu needs Slurm {_LOWEST[0]}.{_LOWEST[1]} or newer; this is {result.stdout.strip()}")

    def submit(self, script: str, spec: JobSpec) -> Command:
        return Command(("sbatch", "--parsable"), stdin=script, without=_contradicting(script))

    def read_submit(self, result: Result) -> str:
        # Sites' wrappers print whole pages before the id (TACC), or lose --parsable.
        ids = re.findall(r"^(?:Submitted batch job )?(\d+)(?:;\S+| on cluster \S+)?$", result.stdout, re.M)
        if result.returncode != 0:
            raise _refused("sbatch refused the job", result, result.output)
        return last_of(ids, "sbatch", result)

    def find(self, name: str, mark: str) -> Command | None:
        """Return one squeue for all jobs of this user, with their comments: squeue cannot select by those."""
        return _query("squeue", "--noheader", "--me", "--array", "--Format=JobArrayID:|,Comment:|")

    def read_found(self, result: Result, mark: str) -> tuple[str, ...]:
        if result.returncode != 0:
            raise _refused("squeue did not answer", result)
        return tuple(re.findall(rf"^(\d+(?:_\d+)?)\|{re.escape(mark)}\|$", result.stdout, re.M))

    def elements(self, job_id: str, count: int) -> tuple[str, ...]:
        """Return ``123_0``, ``123_1``, ...; the id itself if it is no array."""
        return tuple(f"{job_id}_{i}" for i in range(count)) if count > 1 else (job_id,)

    def status(self, job_ids: Sequence[str]) -> Command:
        """Return one squeue for all; it lists jobs for MinJobAge (300 s) after their end."""
        return _query("squeue", "--noheader", "--array", "--states=all", _jobs(job_ids), f"--Format={_COLUMNS}")

    def history(self, job_ids: Sequence[str]) -> Command:
        """Return the sacct for jobs that squeue has forgotten; sites without accounting refuse it."""
        columns = f"--format={_SACCT_COLUMNS}"
        return _query("sacct", "--noheader", "--parsable", "--allocations", columns, _jobs(job_ids))

    def read_status(self, result: Result, job_ids: Sequence[str] = ()) -> Mapping[str, JobStatus]:
        """Parse the output of squeue or sacct. Missing elements of an array that squeue lists have ended."""
        live = result.argv[:1] == ("squeue",)
        # The start is that of a requeued job's last run if it is sacct's.
        out = {}
        for line in result.stdout.splitlines():
            limit, _, rest = line.strip().removesuffix("|").partition("|")
            fields = (f"{limit}|{rest}" if _ID.fullmatch(limit) else rest).split("|", _FIELDS - 1)
            if len(fields) == _FIELDS and _ID.fullmatch(fields[0]):
                out[fields[0]] = replace(_status(*fields[1:], live=live), limit_s=limit_s(limit) if live else None)
        if result.returncode != 0 and not out and not _GONE.search(result.stderr):
            raise _refused(f"{result.argv[0] if result.argv else 'the batch system'} did not answer", result)
        # Cancelled pending elements leave no trace (22.05.8, recording 14). squeue lists all other elements of an
        # array; sacct may not list some running ones yet.
        if live and result.returncode == 0:
            arrays = {job_id.partition("_")[0] for job_id in out}
            over = [job_id for job_id in job_ids if "_" in job_id and job_id.partition("_")[0] in arrays]
            out |= {job_id: JobStatus(JobState.ENDED, "", _NO_MORE) for job_id in over if job_id not in out}
        return out

    def offers(self, spec: JobSpec) -> Command | None:
        """Return the sinfo for the job's partition; None if options change the request, or it is a QOS."""
        options = {o for text in (*spec.extra_directives, *spec.skipped_directives) for o in _keys(text)}
        changes = options & _ASKED or any(o.startswith(("--gpus", "--mem", "--tres")) for o in options)
        return None if self.queue != "partition" or changes else ask_offers(spec.queue)

    def read_offers(self, result: Result) -> tuple[Offer, ...]:
        """Parse the nodes of the partition, or of the default one, for the resources that this site's jobs ask for."""
        by_name = any(word.startswith("--partition=") for word in result.argv)
        return tuple(
            replace(
                offer,
                gpus=None if self.gpus == "none" else offer.gpus,
                cpus=offer.cpus if self.cpus else None,
                memory_bytes=None if self.memory == "none" else offer.memory_bytes,
            )
            for offer in list_offers(result.stdout if result.returncode == 0 else "", self.gpu_type)
            if by_name or offer.is_default
        )

    def test(self, script: str) -> Command:
        return Command(("sbatch", "--test-only"), stdin=script, timeout_s=20.0, without=_contradicting(script))

    def read_test(self, result: Result) -> str:
        """Return ``2026-11-23T06:38:00 on node[1-2] in partition main``, or raise SubmitError with sbatch's message."""
        if result.returncode == 0 and (found := _TESTED.search(result.stderr)):
            return f"{found[1]} on {found[2]} in partition {found[3]}"
        raise _refused("sbatch would refuse the job", result)

    def nodes(self, hosts: Sequence[str]) -> Command | None:
        """Return the sinfo for nodes: a job on a node that does not answer is RUNNING until SlurmdTimeout (300 s)."""
        return _query("sinfo", "--noheader", "--Node", f"--nodes={','.join(hosts)}", "--format=%N|%T|%E")

    def read_nodes(self, result: Result) -> Mapping[str, str]:
        """Return sinfo's state of nodes that are down, or do not answer slurmctld (``mixed*``)."""
        out = dict[str, str]()
        for line in result.stdout.splitlines() if result.returncode == 0 else ():
            # one for each node and partition; the reason is the only free text
            node, state, reason = (*line.strip().split("|", 2), "", "")[:3]
            if state.startswith("down"):
                out[node] = f"{node} is down" if reason in ("", _NO_REASON) else f"{node} is down: {reason}"
            elif state.endswith("*"):
                out[node] = f"{node} does not answer Slurm"
        return out

    def onto(self, job_id: str, node: str, argv: tuple[str, ...]) -> tuple[str, ...]:
        """Return an srun that shares the job's resources with running steps; its output is not buffered by line."""
        where = (f"--jobid={job_id}", f"--nodelist={node}", "--nodes=1", "--ntasks=1", "--unbuffered")
        return ("srun", "--overlap", "--quiet", "--mpi=none", "--cpu-bind=none", *where, *argv)

    def cancel(self, job_ids: Sequence[str]) -> tuple[Command, ...]:
        """Return one scancel for all: ``123_[0-7,9]`` for elements."""
        groups = by_array(job_ids, _ELEMENT).items()
        ids = [f"{before}[{','.join(index_runs(indexes))}]" if indexes else before for (before, _), indexes in groups]
        return (_query("scancel", *ids),) if ids else ()

    def read_cancel(self, result: Result) -> bool:
        gone = bool(_GONE.search(result.stderr))
        if result.returncode != 0 and not gone:
            raise _refused("scancel failed", result)
        return not gone

    def grace(self, job_id: str) -> tuple[Command, ...]:
        scontrol = (_query("scontrol", "--oneliner", "show", what) for what in ("partition", "config"))
        return (ask_preemption(job_id), *scontrol)

    def read_killed_s(self, results: Sequence[Result], came_s: float) -> float:
        """Return the end of a preempted job's GraceTime, which only delays KillWait; else that of KillWait."""
        preemption, partitions, config = (result.stdout for result in results)
        wait = re.search(r"^KillWait\s*=\s*(\d+)", config, re.M)
        if not (start_s := read_preempted_s(results[0])):
            return came_s + int(wait[1] if wait else 0)
        end, partition = preemption.split()[1:3]  # no end is told of a job without a time limit
        grace = re.search(rf"^PartitionName={re.escape(partition)} .*\bGraceTime=(\d+)", partitions, re.M)
        return _seconds(end) or start_s + int(grace[1] if grace else 0)

    def requeue(self, job_id: str) -> Command:
        return _query("scontrol", "requeue", job_id)

    def read_requeue(self, result: Result) -> None:
        """Raise SubmitError in scontrol's words: the job, or the whole Slurm, may allow no requeue (JobRequeue=0)."""
        if result.returncode != 0:
            raise _refused("scontrol does not requeue the job (sbatch has an option --requeue)", result)

    def _options(self, spec: JobSpec) -> list[tuple[str, str | None]]:
        gpus = f"{self.gpu_type}:{spec.gpus_per_node}" if self.gpu_type else str(spec.gpus_per_node)
        style = self.gpus if spec.gpus_per_node else "none"
        total = f"{self.gpu_type}:" * bool(self.gpu_type) + str(spec.gpus_per_node * spec.nodes)
        return [
            ("job-name", spec.name),
            ("output", _folder(spec).replace("%", "%%") + ("slurm-%A_%a.out" if spec.count > 1 else "slurm-%j.out")),
            ("array", f"0-{spec.count - 1}" if spec.count > 1 else None),
            (self.queue, spec.queue),
            ("account", spec.account),
            ("time", None if spec.walltime_s is None else format_duration(spec.walltime_s)),
            ("comment", spec.mark or None),
            ("signal", f"B:USR1@{spec.warn_s}" if spec.warn_s else None),
            ("nodes", str(spec.nodes)),
            ("ntasks-per-node", str(spec.tasks_per_node)),
            ("cpus-per-task", str(spec.cpus_per_task) if spec.cpus_per_task and self.cpus else None),
            ("gpus-per-node", gpus if style == "gpus-per-node" else None),
            ("gres", f"gpu:{gpus}" if style == "gres" else None),
            ("gpus", total if style == "gpus" else None),
            (self.memory, self._memory(spec)),
        ]

    def _memory(self, spec: JobSpec) -> str | None:
        """Return the memory of a node, or of each of its CPUs or GPUs, rounded down so that together they fit."""
        size = spec.memory_per_node_bytes
        if size is None or self.memory == "none":
            return None
        if self.memory == "mem":
            return f"{-(-size // 2**20)}M"
        cpus = spec.tasks_per_node * (spec.cpus_per_task or 1)
        return f"{size // (cpus if self.memory == 'mem-per-cpu' else spec.gpus_per_node or 1) // 2**20}M"


def _query(*argv: str) -> Command:
    return Command(argv, without=_OF_QUERIES)


def _contradicting(script: str) -> frozenset[str]:
    """Return the names of sbatch's variables for options that the script gives, or that no job may have."""
    options = {key for text in re.findall(r"^#SBATCH (.+)$", script, re.MULTILINE) for key in _keys(text)}
    options |= {rival for group in _RIVALS if options.intersection(group) for rival in group}
    return frozenset(_VARIABLES.get(o, f"SBATCH_{o.lstrip('-').replace('-', '_').upper()}") for o in options) | _NEVER


def _jobs(job_ids: Sequence[str]) -> str:
    """Return the option that selects these jobs; an array is selected as a whole."""
    return f"--jobs={','.join(before.rstrip('_') for before, _ in by_array(job_ids, _ELEMENT))}"


def _folder(spec: JobSpec) -> str:
    folder = spec.log_directory or ""
    if "\\" in folder:  # sbatch(1): a backslash turns %j off
        raise ConfigError(f"{opt('log_directory', folder)}: Slurm takes no backslash in it; choose another folder")
    return f"{folder}/" if folder else ""


def _directive(option: str, value: str | None) -> Directive:
    name = _LONG.get(option, option)
    if value is None:
        return Directive(name, name)
    # sbatch takes a backslash for an escape even between single quotes: 'a\b' arrives as ab (22.05.8).
    quoted = value if _PLAIN.fullmatch(value) else '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return Directive(name, f"{name}={quoted}" if name.startswith("--") else f"{name} {quoted}")


def _refuse_colliding(ours: Sequence[Directive], extra: Sequence[Directive]) -> None:
    """Raise ConfigError for a user's option with which sbatch would refuse one of ours, or request more."""
    for pattern, keys, option in _COLLIDING:
        mine = next((directive for directive in ours if directive.key in keys), None)
        theirs = next((directive.text for directive in extra if re.match(pattern, directive.text)), None)
        if mine and theirs:
            raise ConfigError(
                f"{opt('job_extra_directives', None)}: {theirs!r} requests what hpcgpu requests by {mine.text!r}, and "
                f"Slurm refuses the two, or has one of them count: leave it out, and give {opt(option)}; or leave out "
                f"hpcgpu's by {opt('job_directives_skip', [mine.key])}"
            )


def _keys(text: str) -> set[str]:
    return {_LONG.get(option, option) for option, _ in options_in(text)}


def _refused(problem: str, result: Result, message: str = "") -> SubmitError:
    message = message or result.message
    transient = result.returncode == TIMED_OUT or bool(_TRANSIENT.search(message))
    over_limit = bool(_OVER_LIMIT.search(message))
    unsure = transient and not over_limit and not _UNSENT.search(message)
    doubts = {"transient": transient, "over_limit": over_limit, "unsure": unsure}
    doubts["over_size"] = _TOO_LARGE in message  # hpcgpu has written the specification
    return SubmitError(f"{problem}: {message}", evidence=message, **doubts)


def _status(native: str, code: str, starts: str, nodes: str, reason: str, *, live: bool) -> JobStatus:
    state = STATES.get(native.partition(" ")[0].rstrip("+"), JobState.UNKNOWN)
    if state is JobState.PENDING and reason.startswith(_HELD):
        state = JobState.HELD
    if state is JobState.PENDING and _STUCK.match(reason):
        state = JobState.STUCK
    exit_code = _exit_code(code) if state is JobState.ENDED else None
    if exit_code == 0 and native != "COMPLETED":
        exit_code = None  # sacct says 0:0 of a job that was cancelled or ran out of time (22.05.8)
    reason = "" if reason == "None" else reason
    # An epilog runs, or processes do not end. A requeued job passes through this state, too.
    leaves, lost = native == "COMPLETING", native == "NODE_FAIL"
    trouble = f"in state {native}" if leaves else ""
    if lost and nodes:
        trouble = f"on {nodes}"  # of several nodes, the failed one is not named
    # An ending job lists the nodes that it still has, without the lost one.
    placed = lost or (state is JobState.RUNNING and not leaves)
    return JobStatus(
        state,
        native,
        reason,
        exit_code,
        starts if live and state is JobState.PENDING and starts != "N/A" else "",
        advice(reason) if state is JobState.PENDING else "",
        node_names(nodes) if placed else (),
        trouble,
        leaves,
    )


def _exit_code(text: str) -> int | None:
    """Return the exit code of sacct's ``code:signal`` or of squeue's wait status (768 is exit code 3)."""
    if match := re.fullmatch(r"(\d+):(\d+)", text):
        return 128 + int(match[2]) if int(match[2]) else int(match[1])
    if not text.isdecimal():
        return None
    status = int(text)
    return 128 + (status & 127) if status & 127 else status >> 8


def node_names(text: str) -> tuple[str, ...]:
    """Parse squeue's ``node[1-2,07],login1`` into nodes; none for sacct's ``None assigned``, or for ""."""
    words = _COMMA.split(text) if text and " " not in text and text != "(null)" else []
    return tuple(name for word in words for name in _expanded(word))


def _expanded(word: str) -> Iterator[str]:
    match = _RUNS.fullmatch(word)
    if not match:
        yield word
        return
    before, runs, after = match.groups()
    for run in runs.split(","):
        first, _, last = run.partition("-")
        if not first.isdecimal() or not (last or first).isdecimal():  # nothing that Slurm writes
            yield word
            return
        for number in range(int(first), int(last or first) + 1):
            yield from _expanded(f"{before}{number:0{len(first)}}{after}")


def ask_end(job_id: str) -> Command:
    """Return the squeue for the end of a running job's time."""
    return _query("squeue", "--noheader", f"--jobs={job_id}", "--Format=EndTime")


def ask_preemption(job_id: str) -> Command:
    """Return the squeue for the start of a GraceTime, after which another job gets this one's nodes, and its end."""
    # One that was cancelled, requeued, or had its time is not running any more at its SIGTERM (22.05.8).
    columns = "--Format=PreemptTime,EndTime,Partition:64"  # preemption moves the job's end
    return _query("squeue", "--noheader", f"--jobs={job_id}", "--states=running", columns)


def read_preempted_s(result: Result) -> int | None:
    """Return when the GraceTime of a preempted job began, in seconds since the epoch; None: it is not preempted."""
    return _seconds(result.stdout.partition(" ")[0])


def read_needs_requeue(results: Sequence[Result]) -> bool:
    """Return whether a job in a GraceTime must ask for its requeue: it is FAILED otherwise, or COMPLETED (22.05.8).

    24.11.5 requeues it itself, and if the job asks, too, once more when it is through (Slurm's ticket 25682).
    """
    requeued = rf"^PartitionName={''.join(results[0].stdout.split()[2:3])} .*\bPreemptMode=REQUEUE\b"
    by_partition = r"^PreemptType\s*= preempt/partition_prio$(?s:.*)^SLURM_VERSION\s*= (\S+)"
    version = re.search(by_partition, results[2].stdout, re.M)
    itself = version and version[1] >= "24.11" and re.search(requeued, results[1].stdout, re.M)
    return bool(read_preempted_s(results[0])) and not itself


def read_end_s(result: Result) -> int | None:
    """Return the time that was asked for, in seconds since the epoch; None: not told, as an unlimited one."""
    return _seconds(result.stdout.strip())


def _seconds(text: str) -> int | None:
    try:
        return int(datetime.fromisoformat(text).timestamp())
    except ValueError:
        return None


def ask_offers(queue: str | None) -> Command:
    """Return the sinfo for the nodes of a partition, or of all."""
    where = (f"--partition={queue}",) if queue else ()
    return _query("sinfo", "--noheader", "--exact", f"--format={_OFFER_FIELDS}", *where)


def list_offers(text: str, gpu_type: str = "") -> Iterator[Offer]:
    """Yield the nodes of each kind from sinfo's answer; count GPUs of ``gpu_type`` ("": all)."""
    for line in text.splitlines():
        fields = line.strip().split("|", 7)
        if len(fields) == 8 and fields[2].isdecimal():
            queue, name, nodes, limit, size, cpus, memory, gres = fields
            gpus = _GPUS.findall(gres)
            types = {kind for kind, _ in gpus}
            fewest, _, most = size.rpartition("-")
            yield Offer(
                queue=queue,
                nodes=int(nodes),
                gpus=sum(int(n) for kind, n in gpus if gpu_type in ("", kind)),
                gpu=types.pop() if len(types) == 1 else "",
                cpus=int(cpus) if cpus.isdecimal() else None,
                memory_bytes=int(memory) << 20 if memory.isdecimal() else None,
                fewest_nodes=int(fewest) if fewest.isdecimal() else None,
                most_nodes=int(most) if most.isdecimal() else None,
                walltime_s=limit_s(limit),
                is_default=name.endswith("*"),
            )
