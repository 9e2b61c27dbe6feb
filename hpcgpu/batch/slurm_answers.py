"""Ask sinfo, and parse squeue, sacct and sinfo. Tested on Slurm 22.05.8 (tests/data/batch/slurm)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from hpcgpu.batch.common import advice
from hpcgpu.errors import ConfigError
from hpcgpu.model import Command, JobState, JobStatus, Offer, Result
from hpcgpu.units import parse_duration_s

# The reason is the last field: it is the only one with free text.
COLUMNS = "JobArrayID:|,State:|,exit_code:|,StartTime:|,NodeList:|,Reason:|"
SACCT_COLUMNS = "JobID,State,ExitCode,Start,NodeList,Reason"
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
GPUS = re.compile(r"(?:^|,)gpu(?::([^:,()]+))?:(\d+)")


def statuses(text: str, *, live: bool) -> Iterator[tuple[str, JobStatus]]:
    """Yield id and status of each listed job; ``live``: the output is squeue's, not sacct's."""
    # sacct has the start of a requeued job's last run.
    for line in text.splitlines():
        fields = line.strip().removesuffix("|").split("|", _FIELDS - 1)
        if len(fields) == _FIELDS and _ID.fullmatch(fields[0]):
            yield fields[0], _status(*fields[1:], live=live)


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


def read_lost_nodes(result: Result) -> Mapping[str, str]:
    """Return sinfo's state of nodes that are down, or do not answer slurmctld (``mixed*``)."""
    out = dict[str, str]()
    for line in result.stdout.splitlines() if result.returncode == 0 else ():
        node, state, reason = (*line.strip().split("|", 2), "", "")[:3]
        if state.startswith("down"):
            out[node] = f"{node} is down" if reason in ("", _NO_REASON) else f"{node} is down: {reason}"
        elif state.endswith("*"):
            out[node] = f"{node} does not answer Slurm"
    return out


def ask_offers(queue: str | None) -> Command:
    """Return the sinfo for the nodes of a partition, or of all."""
    where = (f"--partition={queue}",) if queue else ()
    return Command(("sinfo", "--noheader", "--exact", f"--format={_OFFER_FIELDS}", *where))


def read_offers(result: Result, gpu_type: str = "") -> tuple[Offer, ...]:
    """Parse the answer to :func:`ask_offers`, or its default partition; count GPUs of ``gpu_type`` ("": all)."""
    asked = any(word.startswith("--partition=") for word in result.argv)
    return tuple(_offers(result.stdout, gpu_type, all_=asked)) if result.returncode == 0 else ()


def _offers(text: str, gpu_type: str, *, all_: bool) -> Iterator[Offer]:
    for line in text.splitlines():
        fields = line.strip().split("|", 7)
        if len(fields) == 8 and fields[2].isdecimal() and (all_ or fields[1].endswith("*")):
            queue, _, nodes, limit, size, cpus, memory, gres = fields
            counts = [int(n) for kind, n in GPUS.findall(gres) if gpu_type in ("", kind)]
            yield Offer(
                queue=queue,
                nodes=int(nodes),
                gpus=sum(counts),
                cpus=int(cpus) if cpus.isdecimal() else None,
                memory_bytes=int(memory) << 20 if memory.isdecimal() else None,
                most_nodes=int(most) if (most := size.rpartition("-")[2]).isdecimal() else None,
                walltime_s=limit_s(limit),
            )


def limit_s(text: str) -> int | None:
    """Parse a limit of sinfo into seconds; None: unlimited, or unknown."""
    try:
        return parse_duration_s(text)
    except ConfigError:  # infinite, n/a
        return None
