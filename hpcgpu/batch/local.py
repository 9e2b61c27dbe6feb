"""Run jobs without a batch system: a job is a process group on this machine, its state is in /proc."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpcgpu.batch.common import Plain
from hpcgpu.batch.script import body
from hpcgpu.errors import ConfigError, SubmitError
from hpcgpu.model import Command, JobSpec, JobState, JobStatus, Result

# A job id is the leader's pid and its start time, because pids are reused.
_ID = re.compile(r"^(\d+\.\d+)(?: (\S+))?$", re.M)
# Fields 3 and 22 of /proc/PID/stat (proc(5)), counted after the name, which may hold anything.
_LOOK = """look() { local stat; stat=$(cat "/proc/${1%.*}/stat" 2>/dev/null) && set -- "$1" ${stat##*)} &&
[ "${1#*.}" = "${21}" ] && state=$2 || state=gone; }
"""
# The job prints its id itself, and its ranks name their workers by it: reading /proc could be too late for a job
# that ends at once. The command substitution waits until the job has closed that descriptor.
_START = """script=$(cat)
me='read -r stat < /proc/$$/stat && set -- ${stat##*)} && export HPCGPU_JOB_ID=$$.${20} && set -- &&
echo "$HPCGPU_JOB_ID" >&4; exec 4>&-
'
if [ -n "$1" ]; then : > "$1" || exit 1; exec 3> "$1"; else exec 3> /dev/null; fi
id=$(setsid bash -c "$me$script" hpcgpu < /dev/null 4>&1 >&3 2>&1 3>&- &)
[ -n "$id" ] && echo "$id"
"""
_ASK = _LOOK + 'for job; do look "$job"; echo "$job $state"; done\n'
# As in batch systems: SIGTERM to all of its processes, and SIGKILL 5 s later to those that are left. The number of a
# living group is not reused.
_END = (
    _LOOK
    + """look "$1"; echo "$1 $state"; [ "$state" != gone ] || exit 0
group=-${1%.*}
over() { for _ in {1..50}; do kill -0 -- "$group" 2>/dev/null || exit 0; sleep 0.1; done; }
kill -TERM -- "$group" 2>/dev/null; kill -CONT -- "$group" 2>/dev/null; over
kill -KILL -- "$group" 2>/dev/null; over
"""
)
_RUNNING = frozenset("RSDIWKP")
_STOPPED = frozenset("Tt")
_ENDED = frozenset(("gone", "Z", "X"))


@dataclass(frozen=True, slots=True)
class Local(Plain):
    """The machine itself; it has no dialect."""

    def notes(self, spec: JobSpec) -> tuple[str, ...]:
        """Return no messages."""
        return ()

    def script(self, spec: JobSpec) -> str:
        """Return the job script. The user's options have no effect: no program reads them."""
        if spec.count > 1:
            raise ConfigError(f"count={spec.count} of job {spec.name!r}: there are no arrays here; allowed: 1")
        return "\n".join(["#!/bin/bash", "", *body(spec)])

    def log(self, spec: JobSpec, job_id: str) -> str:
        """Return the path of the job's output; without a folder it is not kept."""
        return f"{spec.log_directory}/{spec.name.replace('/', '_')}.out" if spec.log_directory else ""

    def submit(self, script: str, spec: JobSpec) -> Command:
        """Return the command that starts the script in its own session; it outlives its parent."""
        return Command(("bash", "-c", _START, "hpcgpu", self.log(spec, "")), stdin=script)

    def read_submit(self, result: Result) -> str:
        """Return the job id, or raise SubmitError with bash's message."""
        match = _ID.search(result.stdout)
        if result.returncode == 0 and match and not match[2]:
            return match[1]
        raise _refused("the job could not be started", result)

    def split(self, count: int) -> tuple[int, ...]:
        """Return a submission for each job: there are no common."""
        return (1,) * count

    def find(self, name: str, mark: str) -> Command | None:
        """Return None: processes are not marked."""
        return None

    def read_found(self, result: Result, mark: str) -> tuple[str, ...]:
        """Return no ids."""
        return ()

    def elements(self, job_id: str, count: int) -> tuple[str, ...]:
        """Return the id itself."""
        return (job_id,)

    def status(self, job_ids: Sequence[str]) -> Command:
        """Return one command that reads /proc for all jobs."""
        return Command(("bash", "-c", _ASK, "hpcgpu", *job_ids))

    def history(self, job_ids: Sequence[str]) -> Command:
        """Return the command of ``status``: /proc has no ended processes."""
        return self.status(job_ids)

    def read_status(self, result: Result, job_ids: Sequence[str] = ()) -> Mapping[str, JobStatus]:
        """Return each job's state; exit codes are only in ``JobSpec.exit_file``."""
        out = {job_id: JobStatus(_state(native), native) for job_id, native in _ID.findall(result.stdout) if native}
        if result.returncode != 0 and not out:
            raise _refused("/proc did not answer", result)
        return out

    def nodes(self, hosts: Sequence[str]) -> Command | None:
        """Return None: the only node is this machine."""
        return None

    def read_nodes(self, result: Result) -> Mapping[str, str]:
        """Return no nodes."""
        return {}

    def onto(self, job_id: str, node: str, argv: tuple[str, ...]) -> tuple[str, ...]:
        """Return ``argv`` unchanged."""
        return argv

    def cancel(self, job_ids: Sequence[str]) -> tuple[Command, ...]:
        """Return the commands that end each job's process group and wait until its leader is gone."""
        return tuple(Command(("bash", "-c", _END, "hpcgpu", job_id)) for job_id in job_ids)

    def read_cancel(self, result: Result) -> bool:
        """Return False if the job was gone already."""
        match = _ID.search(result.stdout)
        if result.returncode != 0 or not match:
            raise _refused("the job could not be ended", result)
        return _state(match[2] or "") is not JobState.ENDED


def _state(native: str) -> JobState:
    if native in _ENDED:
        return JobState.ENDED
    if native in _STOPPED:
        return JobState.SUSPENDED
    return JobState.RUNNING if native in _RUNNING else JobState.UNKNOWN


def _refused(problem: str, result: Result) -> SubmitError:
    message = result.stderr.strip() or f"exit code {result.returncode}, no output"
    return SubmitError(f"{problem}: {message}", evidence=result.stderr, transient=result.returncode == 124)
