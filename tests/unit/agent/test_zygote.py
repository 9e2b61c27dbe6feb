"""The process that forks for its rank."""

from __future__ import annotations

import operator
import os
import signal
import socket

import pytest

from hpcgpu.agent.zygote import Zygote
from hpcgpu.errors import LaunchError
from hpcgpu.host import process


def test_one_that_does_not_answer_is_killed_and_said() -> None:
    forked = Zygote.fork()
    zygote = Zygote(forked.sock, forked.pid, answer_s=0.2)
    os.kill(zygote.pid, signal.SIGSTOP)
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(LaunchError, match=f"the zygote, process {zygote.pid}, did not answer within 0.2"):
        zygote.spawn("builtins:print", None, (theirs.fileno(), 1, 2))
    assert os.waitstatus_to_exitcode(os.waitpid(zygote.pid, 0)[1]) == -signal.SIGKILL
    zygote.close()


def test_at_its_end_what_it_forked_is_gone() -> None:
    zygote = Zygote.fork()
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            pid = zygote.spawn("operator:call", operator.methodcaller("recv", 1), (theirs.fileno(), 1, 2))  # it waits
        zygote.close()
        assert not process.alive(pid)
    assert os.waitpid(zygote.pid, 0)[1] == 0
