"""What is said when the scheduler process does not start."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest

from hpcgpu.agent.rank0 import wait_started
from hpcgpu.errors import LaunchError


def waited(code: int | None, *sent: dict[str, Any], ended: bool = True) -> dict[str, Any]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"".join(json.dumps(message).encode() + b"\n" for message in sent))
        if ended:
            theirs.close()
        return wait_started(ours, lambda: code, 60.0 if ended else 0.01)


@pytest.mark.parametrize(
    ("code", "end"),
    [(-9, "was killed by signal 9"), (3, "exited with status 3"), (None, "closed its connection")],
)
def test_wait_started_reports_the_schedulers_end(code: int | None, end: str) -> None:
    assert waited(None, {"op": "started", "port": 1}) == {"op": "started", "port": 1}
    with pytest.raises(LaunchError, match=f"the scheduler process {end} before it listened"):
        waited(code)


def test_its_error_is_said_with_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    text = "Traceback of 5,000 characters".ljust(5000, ".") + "\n"
    with pytest.raises(LaunchError, match="the scheduler could not be started: OSError: no room"):
        waited(1, {"op": "error", "text": text, "reason": "OSError: no room"})
    assert capsys.readouterr().err == text


def test_silence_is_said() -> None:
    with pytest.raises(LaunchError, match=r"does not listen after 0.01 s; the traceback above"):
        waited(None, ended=False)
