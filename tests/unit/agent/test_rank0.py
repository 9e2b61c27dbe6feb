"""What is said when the scheduler process does not start."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest

from hpcgpu.agent.rank0 import SchedulerChild
from hpcgpu.errors import LaunchError


class ForkServer:
    """Knows how its child ended."""

    def __init__(self, code: int | None) -> None:
        self.code = code

    def wait_exit(self, pid: int, deadline_s: float) -> int | None:
        return self.code


def child(code: int | None, *sent: dict[str, Any], ended: bool = True) -> tuple[SchedulerChild, socket.socket]:
    ours, theirs = socket.socketpair()
    theirs.sendall(b"".join(json.dumps(message).encode() + b"\n" for message in sent))
    if ended:
        theirs.close()
    return SchedulerChild(1, ours, ForkServer(code)), theirs  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("code", "end"),
    [(-9, "was killed by signal 9"), (3, "exited with status 3"), (None, "closed its connection")],
)
def test_wait_started_reports_the_schedulers_end(code: int | None, end: str) -> None:
    assert child(None, {"op": "started", "port": 1})[0].wait_started() == {"op": "started", "port": 1}
    with pytest.raises(LaunchError, match=f"the scheduler process {end} before it listened"):
        child(code)[0].wait_started()


def test_its_error_is_said_with_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    text = "Traceback of 5,000 characters".ljust(5000, ".") + "\n"
    scheduler, _ = child(1, {"op": "error", "text": text, "reason": "OSError: no room"})
    with pytest.raises(LaunchError, match="the scheduler could not be started: OSError: no room"):
        scheduler.wait_started()
    assert capsys.readouterr().err == text


def test_silence_is_said() -> None:
    scheduler, there = child(None, ended=False)
    with pytest.raises(LaunchError, match=r"does not listen after 0.01 s; the traceback above"):
        scheduler.wait_started(0.01)
    there.close()
