"""Ranks of a node go into MPI together with their leader, which comes last."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator

import pytest
from shared_host import NEIGHBOUR, by_root
from waiting import aside, scaled

from hpcgpu.agent.rendezvous import wait_for_leader
from hpcgpu.host import process

LEAD = """
import os, sys
from hpcgpu.agent import rendezvous
from hpcgpu.host import process
print("up", flush=True)
sys.stdin.readline()
with process.titled(rendezvous.TITLE):
    print("at the rendezvous", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def launch() -> str:
    return uuid.uuid4().hex


def leads(launch: str) -> dict[str, str]:
    """What the leader of a launch has in its environment."""
    own = {"OMPI_COMM_WORLD_RANK": "4", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    return {**os.environ, **own, "PMIX_NAMESPACE": launch}


@pytest.fixture
def leader(launch: str) -> Iterator[subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", LEAD], env=leads(launch), stdin=pipe, stdout=pipe, text=True
    ) as process:
        assert process.stdout.readline() == "up\n"
        yield process
        process.kill()


def test_followers_go_when_their_leader_does(launch: str, leader: subprocess.Popen[str]) -> None:
    follower = aside(lambda: wait_for_leader(launch))
    with pytest.raises(TimeoutError):
        follower.result(2)  # longer than for a leader that cannot be seen
    leader.stdin.write("come\n")
    leader.stdin.flush()
    assert leader.stdout.readline() == "at the rendezvous\n"
    follower.result(5)


def test_dead_leader_or_another_launchs_is_not_waited_for(launch: str, leader: subprocess.Popen[str]) -> None:
    another = aside(lambda: wait_for_leader(uuid.uuid4().hex))
    another.result(8)  # 10 s is for a leader that is there
    leader.kill()
    leader.wait()
    aside(lambda: wait_for_leader(launch)).result(8)


@by_root
def test_another_user_who_plays_the_leader_is_not_waited_for(launch: str) -> None:
    """A launch's name can be guessed; root sees, and could be told, what stands in anybody's environment."""
    pipe, user = subprocess.PIPE, {"user": NEIGHBOUR, "group": NEIGHBOUR, "extra_groups": ()}
    argv = ["sh", "-c", "echo up; read -r rest"]
    with subprocess.Popen(argv, env=leads(launch), stdin=pipe, stdout=pipe, text=True, **user) as neighbour:
        assert neighbour.stdout.readline() == "up\n"
        assert neighbour.pid not in {p.pid for p in process.user_processes()}
        aside(lambda: wait_for_leader(launch)).result(8)  # 10 s is for a leader that is there
        assert neighbour.poll() is None
        neighbour.kill()


def test_siblings_are_the_other_children_of_the_parent() -> None:
    """A rank and its leader, as their launcher starts them: nobody else's environment is read."""
    code = "import os; from hpcgpu.host import process; print(os.getpid(), *[p.pid for p in process.siblings()])"
    script = f'sleep 60 & first=$!; {sys.executable} -c "{code}"; echo $first; kill $first'
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=scaled(60), check=True)
    (own, *siblings), (first,) = (line.split() for line in done.stdout.splitlines())
    assert siblings == [first, own]
