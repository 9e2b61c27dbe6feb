"""qstat's answers: the jobs, their fields, and what these say of a job. OpenPBS 23.06.06.

Together: the fields that one half cuts out of the text are those that the other half reads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from types import MappingProxyType

from hpcgpu.batch.batch_system import advice, limit_s
from hpcgpu.model import JobState, JobStatus
from hpcgpu.units import counted

ID = r"\d+(?:\[\d*\])?\.[\w.-]+"
# qstat's JSON is parsed by line, because it is not always JSON: a bare nan or .5 anywhere in a job, a byte that is no
# UTF-8, an empty value that swallows the next (16-json-quirks, 18-json-values; OpenPBS 23.06.06).
_HEADER = re.compile(rf'[ \t]*"({ID})"\s*:\s*{{\s*')
_WITHIN = frozenset(
    {
        ("estimated", "start_time"),
        ("Resource_List", "mem"),
        ("Resource_List", "walltime"),
        ("Variable_List", "PBS_O_WORKDIR"),
    }
)
_FIELD = re.compile(r'([ \t]*)"([^"]*)"\s*:\s*(.*?),?\s*')
STATES: Mapping[str, JobState] = MappingProxyType(
    {
        **dict.fromkeys("QWTM", JobState.PENDING),
        **dict.fromkeys("H", JobState.HELD),
        **dict.fromkeys("RBE", JobState.RUNNING),
        **dict.fromkeys("SU", JobState.SUSPENDED),
        **dict.fromkeys("FX", JobState.ENDED),
    }
)
# The second after 21 of them, in a hold that only an operator can release (37-held-too-many-attempts).
_STUCK = re.compile("Can Never Run|(job held|Job Array Held), too many failed attempts to run")
# No reasons to wait: the comment of an element once another one of its array runs (14-array), and of a requeued job's
# last life.
_PAST = re.compile("Job Array Began at |Job run at ")
_HOLDS = MappingProxyType({"u": "by its user", "o": "by an operator", "s": "by PBS"})
# Exit_status of a job that PBS ended itself (OpenPBS 23.06.06, job.h). The others below zero are shown as numbers.
_ENDS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("-1", "-2", "-3"), "it could not be started"),
        **{"-10": "its node does not know its user", "-14": "a node of it was lost", "-20": "its first node was lost"},
        **dict.fromkeys(("-16", "-17"), "a hook on its node rejected it"),
        **{"-18": "a hook asked to requeue it", "-19": "a hook asked to delete it", "-22": "a hook on its node failed"},
        **dict.fromkeys(("-24", "-25"), "it used more cores than it has (ncpus)"),
        **{"-26": "it used more than its vmem", "-27": "it used more than its memory", "-28": "its CPU time was over"},
        **{"-29": "its walltime was over", "-30": "its nodes could not join"},
    }
)


def read_job(fields: Mapping[str, str], *, array_is_held: bool) -> JobStatus:
    """Return what a job's fields say of it; an element of a held array is Q (run/43)."""
    native, comment = fields.get("job_state", ""), fields.get("comment", "")
    state = STATES.get(native, JobState.UNKNOWN)
    if state is JobState.PENDING and (array_is_held or fields.get("Hold_Types", "n") not in ("n", "")):
        state = JobState.HELD
    waits, ended = state in (JobState.PENDING, JobState.HELD), state is JobState.ENDED
    if waits:
        depend, kinds = fields.get("depend", ""), fields.get("Hold_Types", "")
        held = f"its dependency: {depend}" if depend else ", ".join(v for k, v in _HOLDS.items() if k in kinds)
        comment = ("" if _PAST.match(comment) else comment) or held
    if waits and _STUCK.match(comment):
        state = JobState.STUCK
    status, lives = fields.get("Exit_status", ""), fields.get("run_count", "0")
    if ended and not comment and not status and fields.get("substate") == "92" and "depend" in fields:
        comment = f"its dependency was not met: {fields['depend']}"  # PBS deletes it (run/70)
    trouble = f"Exit_status {status}: {_ENDS.get(status, 'PBS ended it')}" if ended and status.startswith("-") else ""
    if waits and lives.isdecimal() and int(lives):
        trouble = f"started {counted(int(lives), 'time')}"
    leaves = native == "E"  # for long where its output cannot be written
    starts = fields.get("Execution_Time" if native == "W" else "estimated.start_time", "")
    starts = at.isoformat() if (at := moment(starts)) else starts
    return JobStatus(
        state,
        native,
        comment,
        # A running job may carry the status of its first life, a queued one that of its array, as one without history.
        _exit_code(status) if ended and comment != "Subjob finished" else None,
        starts if state is JobState.PENDING else "",
        advice(comment) if state is JobState.STUCK or "would conflict with" in comment else "",
        tuple(dict.fromkeys(hosts(fields) if state is JobState.RUNNING else ())),
        "in state E" if leaves else trouble,
        leaves,
        limit_s(fields.get("Resource_List.walltime", "")),
    )


def whole(job_id: str) -> str:
    """Return the id of an element's array; for other jobs the id itself."""
    return re.sub(r"\[\d+\]", "[]", job_id)


def _exit_code(text: str) -> int | None:
    """Return the exit code as in a shell, PBS's 271 is SIGTERM, 143; None for a job that PBS ended."""
    if not text.isdecimal():
        return None
    return int(text) - 128 if int(text) > 256 else int(text)


def list_jobs(text: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield each job's id and its fields; of nested ones, such as the environment's, only those of ``_WITHIN``."""
    job_id, indent, inside, fields = "", "", "", dict[str, str]()
    for line in text.splitlines():
        if match := _HEADER.fullmatch(line):
            if job_id:
                yield job_id, fields
            job_id, indent, inside, fields = match[1], "", "", {}
        elif job_id and (match := _FIELD.fullmatch(line)):
            indent = indent or match[1]
            if match[1] == indent:
                inside = match[2] if match[3] == "{" else ""
                fields.setdefault(match[2], _unquoted(match[3]))
            elif (inside, match[2]) in _WITHIN:
                fields.setdefault(f"{inside}.{match[2]}", _unquoted(match[3]))
    if job_id:
        yield job_id, fields


def hosts(fields: Mapping[str, str]) -> list[str]:
    """Return the host of each chunk of a job: ``node1/0*2+node2/0*2``."""
    return [word.partition("/")[0] for word in fields.get("exec_host", "").split("+") if word]


def moment(text: str) -> datetime | None:
    """Return a local time, of which PBS writes seconds or a text; None for other texts."""
    try:
        return datetime.fromtimestamp(int(text)) if text.isdigit() else datetime.strptime(text, "%a %b %d %H:%M:%S %Y")
    except (ValueError, OverflowError):
        return None


def _unquoted(value: str) -> str:
    if len(value) < 2 or value[0] != '"':
        return value
    try:
        return str(json.loads(value, strict=False))
    except ValueError:
        return value[1:-1]
