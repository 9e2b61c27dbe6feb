"""What a rank has in the background meets what nobody expected: what is said, and what happens then."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import failures, run

from hpcgpu.agent.fork_server import ForkServer, ForkServerSpawner
from hpcgpu.agent.leader import Leader, LeaderContext, Member
from hpcgpu.model import RunDocument, Settings


def context() -> Any:
    settings = Settings()
    return LeaderContext(
        run=RunDocument(settings=settings, shape="gang", folder=""),
        **{"environ": {}, "fork_server": None, "scheduler": {}, "workers": ()},
    )


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ours, theirs


def test_fork_server_with_unreadable_reports_counts_as_dead(
    pair: tuple[socket.socket, socket.socket], log: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        ours, theirs = pair
        died = asyncio.Event()
        spawner = ForkServerSpawner(ForkServer(ours, 0), died.set)
        child = spawner.adopt(1 << 30, theirs)
        theirs.send(b"garbage")
        await died.wait()
        assert child.exited.result() == -9

    run(body)
    (said,) = failures(log)
    assert said.startswith("reading the fork server's reports failed: UnpicklingError")


class Stubborn(Leader):
    def stop(self, sig: signal.Signals, why: str) -> None:
        raise RuntimeError("no")


def test_a_signal_ends_the_run_also_where_its_answer_raises(log: pytest.LogCaptureFixture) -> None:
    leader = Stubborn(context())
    leader._answer(signal.SIGTERM)()
    assert leader.exit_code == 128 + signal.SIGTERM
    assert leader.why.startswith("it got SIGTERM")
    assert failures(log) == ["the answer to SIGTERM failed: RuntimeError: no"]


def test_a_member_that_cannot_hand_over_ends_with_the_reason(log: pytest.LogCaptureFixture) -> None:
    def close_gracefully(reason: str) -> None:
        raise RuntimeError("no")

    async def body() -> None:
        member = Member(context())
        member.watch = SimpleNamespace(peer_address="tls://x")
        member.nannies = [SimpleNamespace(close_gracefully=close_gracefully)]
        member.drain(None)
        await member.ended.wait()
        assert (member.exit_code, member.why) == (
            os.EX_SOFTWARE,
            "its workers could not be retired: RuntimeError: no",
        )

    run(body)
    assert failures(log) == ["handing over the workers' data failed: RuntimeError: no"]
