"""A batch system for tests: a job is a process group on this machine, its state is in /proc."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from paths import SUPPORT

from hpcgpu import batch
from hpcgpu.batch.common import BatchSystem, script_body
from hpcgpu.errors import SubmitError
from hpcgpu.model import Command, JobSpec, JobState, JobStatus, Result

if TYPE_CHECKING:
    import pytest

# The environment of a process that is to know it, too.
ENVIRONMENT = {"PYTHONPATH": f"{SUPPORT / 'local_site'}:{SUPPORT}"}
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


@dataclass(frozen=True, slots=True)
class Local(BatchSystem):
    """The machine itself: no dialect, no arrays, no nodes, no marks."""

    def script(self, spec: JobSpec) -> str:
        return "\n".join(["#!/bin/bash", "", *script_body(spec)])

    def log(self, spec: JobSpec, job_id: str) -> str:
        return f"{spec.log_directory}/{spec.name.replace('/', '_')}.out" if spec.log_directory else ""

    def submit(self, script: str, spec: JobSpec) -> Command:
        return Command(("bash", "-c", _START, "hpcgpu", self.log(spec, "")), stdin=script)

    def read_submit(self, result: Result) -> str:
        if not (ids := _ID.findall(result.stdout)):
            raise SubmitError(result.stderr)
        return str(ids[0][0])

    def find(self, name: str, mark: str) -> Command | None:
        return None

    def read_found(self, result: Result, mark: str) -> tuple[str, ...]:
        return ()

    def elements(self, job_id: str, count: int) -> tuple[str, ...]:
        return (job_id,)

    def status(self, job_ids: Sequence[str]) -> Command:
        return Command(("bash", "-c", _ASK, "hpcgpu", *job_ids))

    history = status

    def read_status(self, result: Result, job_ids: Sequence[str] = ()) -> Mapping[str, JobStatus]:
        """Return each job's state; exit codes are only in ``JobSpec.exit_file``."""
        return {job_id: JobStatus(_state(native), native) for job_id, native in _ID.findall(result.stdout)}

    def nodes(self, hosts: Sequence[str]) -> Command | None:
        return None

    def read_nodes(self, result: Result) -> Mapping[str, str]:
        return {}

    def onto(self, job_id: str, node: str, argv: tuple[str, ...]) -> tuple[str, ...]:
        return argv

    def cancel(self, job_ids: Sequence[str]) -> tuple[Command, ...]:
        return tuple(Command(("bash", "-c", _END, "hpcgpu", job_id)) for job_id in job_ids)

    def read_cancel(self, result: Result) -> bool:
        return not result.stdout.rstrip().endswith("gone")


def _state(native: str) -> JobState:
    return JobState.ENDED if native in ("gone", "Z", "X") else JobState.RUNNING


def register() -> None:
    """Let ``hpcgpu.batch.get`` know it, in this process."""
    batch.SYSTEMS = MappingProxyType({**batch.SYSTEMS, "local": Local})


def use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process know it during a test, and all processes that it starts, such as the guard."""
    monkeypatch.setattr(batch, "SYSTEMS", batch.SYSTEMS)
    register()
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
