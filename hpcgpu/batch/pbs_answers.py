"""Parse the output of PBS's programs. Tested on recordings of two builds of OpenPBS (tests/data/batch/pbs)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType

from hpcgpu.batch.common import advice
from hpcgpu.errors import SubmitError
from hpcgpu.model import Command, JobState, JobStatus, Result

ID = r"\d+(?:\[\d*\])?\.[\w.-]+"
# qstat's JSON is parsed by line, because it is not always JSON: a bare nan or .5 anywhere in a job, a byte that is no
# UTF-8, an empty value that swallows the next (16-json-quirks, 18-json-values; OpenPBS 23.06.06).
_HEADER = re.compile(rf'[ \t]*"({ID})"\s*:\s*{{\s*')
_WITHIN = frozenset({("estimated", "start_time"), ("Resource_List", "mem")})
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
_UNKNOWN = re.compile(rf"Unknown Job Id ({ID})")
# The second after 21 of them, in a hold that only an operator can release (37-held-too-many-attempts).
_STUCK = re.compile("Can Never Run|job held, too many failed attempts to run")
_GONE = re.compile(r"Unknown Job Id|Job has finished", re.IGNORECASE)
# The comment of a waiting element once another one of its array runs: no reason (14-array).
_BEGAN = re.compile("Job Array Began at ")
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
# With this message no job was submitted (33-server-trouble); with any other it may have been.
_UNSENT = "cannot connect to server"


def read_status(result: Result, job_ids: Sequence[str] = ()) -> Mapping[str, JobStatus]:
    """Parse qstat's output; jobs that it does not know, and the elements of such arrays, have ended."""
    # A job that "has finished" is left to the history, which has its exit code and reason. A job that is neither listed
    # nor unknown may be alive: OpenPBS of 2026-04 drops all jobs after an unknown one.
    out, gone = dict[str, JobStatus](), dict[str, JobStatus]()
    held = set[str]()
    for job_id, fields in listed(result.stdout):
        if "[]" in job_id and fields.get("job_state") == "H":
            held.add(job_id)
        if "[]" not in job_id:
            out[job_id] = _status(fields, array_is_held=_whole(job_id) in held)
    for line in result.stderr.splitlines():
        if match := _UNKNOWN.search(line):
            gone.setdefault(match[1], JobStatus(JobState.ENDED, "", line.strip()))
    # Only here the state of an array says that of an element; the array of a running one is B, or F with 1.
    over = {job_id: gone[array] for job_id in job_ids if (array := _whole(job_id)) in gone}
    if result.returncode != 0 and not out and not gone and not _GONE.search(result.stderr):
        raise refused("qstat did not answer", result)
    return out | {job_id: s for job_id, s in (gone | over).items() if job_id not in out}


def read_cancel(result: Result) -> bool:
    """Return False if the job has ended or is ending already; raise SubmitError with qdel's message."""
    over = bool(_GONE.search(result.stderr) or _ENDING.search(result.stderr))
    if result.returncode != 0 and not over:
        raise refused("qdel failed", result)
    return not over


def read_down(result: Result) -> Mapping[str, str]:
    """Return pbsnodes' state of nodes that do not answer the server; empty if pbsnodes itself did not answer."""
    troubles, node = dict[str, str](), ""
    for line in result.stdout.splitlines():
        if header := _NODE.fullmatch(line):
            node = header[1]
        elif (state := _NODE_STATE.fullmatch(line)) and not _AWAY.isdisjoint(state[1].split(",")):
            troubles[node] = f"{node} is {state[1]}"
    return troubles


def unreachable(result: Result) -> str:
    """Return the job that qdel failed to end because its node does not answer; "" for other failures."""
    match = _NO_NODE.search(result.stderr) if result.returncode != 0 else None
    return match[1] if match else ""


def _status(fields: Mapping[str, str], *, array_is_held: bool) -> JobStatus:
    native, comment = fields.get("job_state", ""), fields.get("comment", "")
    state = STATES.get(native, JobState.UNKNOWN)
    if state is JobState.PENDING and (array_is_held or fields.get("Hold_Types", "n") not in ("n", "")):
        state = JobState.HELD  # an element of a held array is Q (run/43)
    if state in (JobState.PENDING, JobState.HELD) and _BEGAN.match(comment):
        comment = ""
    if state in (JobState.PENDING, JobState.HELD) and _STUCK.match(comment):
        state = JobState.STUCK
    # A running job may carry the status of its first life, a queued one that of its array.
    code = _exit_code(fields.get("Exit_status", "")) if state is JobState.ENDED else None
    starts = moment(fields.get("estimated.start_time", "")) if state is JobState.PENDING else ""
    instead = advice(comment) if state is JobState.STUCK else ""
    on = hosts(fields) if state is JobState.RUNNING else ()
    leaves = native == "E"  # for long where its output cannot be written
    trouble = f"in state {native}" if leaves else ""
    return JobStatus(state, native, comment, code, starts, instead, tuple(dict.fromkeys(on)), trouble, leaves)


def _whole(job_id: str) -> str:
    """Return the id of an element's array; for other jobs the id itself."""
    return re.sub(r"\[\d+\]", "[]", job_id)


def _exit_code(text: str) -> int | None:
    """Return the exit code as in a shell: PBS's 271 is SIGTERM, 143. Below zero PBS ended the job (-29: walltime)."""
    if not re.fullmatch(r"-?\d+", text):
        return None
    return int(text) - 128 if int(text) > 256 else int(text)


def refused(problem: str, result: Result) -> SubmitError:
    """Return the error for a program's failure, with its message."""
    output = result.stderr.strip() or result.stdout.strip()
    message = output.partition("\nusage:")[0] or f"exit code {result.returncode}, no output"
    transient, over_limit = result.returncode in _TRANSIENT, result.returncode in _OVER_LIMIT
    unsure = transient and not over_limit and _UNSENT not in output
    return SubmitError(
        f"{problem}: {message}", evidence=output, transient=transient, over_limit=over_limit, unsure=unsure
    )


def listed(text: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield each job's id and its fields."""
    # Of nested fields, such as the environment's, only estimated.start_time and Resource_List.mem are kept.
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


def moment(text: str) -> str:
    """Return a time in Slurm's format, in local time; PBS writes seconds or a text."""
    try:
        at = datetime.fromtimestamp(int(text)) if text.isdigit() else datetime.strptime(text, "%a %b %d %H:%M:%S %Y")
    except (ValueError, OverflowError):
        return text
    return at.isoformat()


def _unquoted(value: str) -> str:
    if len(value) < 2 or value[0] != '"':
        return value
    try:
        return str(json.loads(value, strict=False))
    except ValueError:
        return value[1:-1]


# --- the memory that PBS has granted a job: no variable in the job has it. The cgroups hook, if a site has it, enforces
# this limit on each node; otherwise nothing does.

# A server that hangs does not answer (33-server-trouble), and this job's ranks wait meanwhile.
_TIMEOUT_S = 10.0
_CHUNK = re.compile(r"\(([^()]*)\)")
_MEM = re.compile(r":mem=([^:+]+)")
_SIZE = re.compile(r"(\d+)([kmgtp]?)([bw]?)", re.IGNORECASE)


def ask_memory(job_id: str) -> Command:
    """Return the qstat for one running job, which may be an array's element."""
    return Command(("qstat", "-f", "-F", "json", job_id), timeout_s=_TIMEOUT_S)


def read_memory(result: Result) -> Mapping[str, int]:
    """Return the granted bytes of each host, 0 for a host without; empty if no host has any. Raises SubmitError."""
    # A host may have several chunks, and a chunk several vnodes of its host, with other names. Memory of the whole job,
    # by resources_default.mem, is in no chunk: the hosts have equal parts of it.
    _, fields = next(listed(result.stdout), ("", None))
    if fields is None:
        message = result.stderr.strip() or f"exit code {result.returncode}, no job"
        raise SubmitError(f"qstat did not answer: {message}", evidence=message)
    host_names = hosts(fields)
    chunks = _CHUNK.findall(fields.get("exec_vnode", ""))
    if not host_names or len(host_names) != len(chunks):
        return {}
    granted = dict.fromkeys(host_names, 0)
    for host, chunk in zip(host_names, chunks, strict=True):
        granted[host] += sum(map(_size_bytes, _MEM.findall(chunk)))
    if not any(granted.values()):
        granted = dict.fromkeys(granted, _size_bytes(fields.get("Resource_List.mem", "")) // len(granted))
    return granted if any(granted.values()) else {}


def _size_bytes(text: str) -> int:
    """Return the bytes of a PBS size, ``2097152kb``; 0 if invalid. Units are powers of 1024, a word has 8 bytes."""
    match = _SIZE.fullmatch(text)
    if not match:
        return 0
    power = " kmgtp".index(match[2].lower() or " ")
    return (int(match[1]) << 10 * power) * (8 if match[3] in ("w", "W") else 1)
