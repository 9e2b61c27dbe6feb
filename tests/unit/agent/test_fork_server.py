"""The process that forks for its rank."""

from __future__ import annotations

import operator
import os
import signal
import socket

import pytest

from hpcgpu.agent.fork_server import ForkServer
from hpcgpu.errors import LaunchError
from hpcgpu.host import process


def test_one_that_does_not_answer_is_killed_and_said() -> None:
    forked = ForkServer.fork()
    fork_server = ForkServer(forked.sock, forked.pid, answer_s=0.2)
    os.kill(fork_server.pid, signal.SIGSTOP)
    ours, theirs = socket.socketpair()
    with (
        ours,
        theirs,
        pytest.raises(LaunchError, match=f"the fork server, process {fork_server.pid}, did not answer within 0.2"),
    ):
        fork_server.spawn("builtins:print", None, (theirs.fileno(), 1, 2))
    assert os.waitstatus_to_exitcode(os.waitpid(fork_server.pid, 0)[1]) == -signal.SIGKILL
    fork_server.close()


def test_at_its_end_what_it_forked_is_gone() -> None:
    fork_server = ForkServer.fork()
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            pid = fork_server.spawn(
                "operator:call", operator.methodcaller("recv", 1), (theirs.fileno(), 1, 2)
            )  # it waits
        fork_server.close()
        assert not process.alive(pid)
    assert os.waitpid(fork_server.pid, 0)[1] == 0
