"""What squeue and sacct print of jobs. Tried on Slurm 22.05.8 (tests/data/batch/slurm)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from hpcgpu.batch import slurm_nodes
from hpcgpu.batch.offers import advice
from hpcgpu.model import JobState, JobStatus

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
# A node could not start it; squeue of 22.05.8 has the words with spaces, scontrol with underscores.
_STUCK = re.compile("launch.failed.requeued.held")
_ID = re.compile(r"\d+(?:_\d+)?")


def statuses(text: str, *, live: bool) -> Iterator[tuple[str, JobStatus]]:
    """Yield what is listed: the id of each job and how it is.

    Parameters
    ----------
    text : str
        What was printed, with the columns from above.
    live : bool
        By squeue: of a requeued job sacct has the start of its last life.

    """
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
    # An epilog runs, or processes do not end. One that is requeued passes through it, too.
    leaves, lost = native == "COMPLETING", native == "NODE_FAIL"
    trouble = f"in state {native}" if leaves else ""
    if lost and nodes:
        trouble = f"on {nodes}"  # of several it is not said which one failed
    # The nodes of one on its way out are those on which it still is: not the lost one.
    placed = lost or (state is JobState.RUNNING and not leaves)
    return JobStatus(
        state,
        native,
        reason,
        exit_code,
        starts if live and state is JobState.PENDING and starts != "N/A" else "",
        advice(reason) if state is JobState.PENDING else "",
        slurm_nodes.names(nodes) if placed else (),
        trouble,
    )


def _exit_code(text: str) -> int | None:
    """Return the exit code of sacct's ``code:signal`` or of squeue's wait status (768 is exit code 3)."""
    if found := re.fullmatch(r"(\d+):(\d+)", text):
        return 128 + int(found[2]) if int(found[2]) else int(found[1])
    if not text.isdecimal():
        return None
    status = int(text)
    return 128 + (status & 127) if status & 127 else status >> 8
