"""Ranks of a node go into MPI together with their leader, which comes last."""

from __future__ import annotations

import threading
import uuid

import pytest

from hpcgpu.agent import meeting
from hpcgpu.agent.meeting import leader_first


def test_followers_go_when_their_leader_does() -> None:
    launch, went = uuid.uuid4().hex, list[str]()

    def follow() -> None:
        with leader_first(launch, 1):
            went.append("follower")

    followers = [threading.Thread(target=follow) for _ in range(3)]
    for thread in followers:
        thread.start()
    went.append("leader")
    with leader_first(launch, 0):
        for thread in followers:
            thread.join()
    assert went == ["leader", "follower", "follower", "follower"]


def test_who_sees_no_leader_goes_all_the_same_and_without_a_launch_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_LEADER_S", 0.01)
    asked: list[float] = []
    monkeypatch.setattr(meeting.time, "sleep", lambda s, sleep=meeting.time.sleep: (asked.append(s), sleep(s)))
    with leader_first("", 1):
        assert asked == []
    with leader_first(uuid.uuid4().hex, 0), leader_first(uuid.uuid4().hex, 1):
        assert asked, "the leader of another launch is none"
