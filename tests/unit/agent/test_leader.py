"""A leader whose end does not come is ended, with all that it has started."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

from waiting import scaled

CODE = """
import asyncio, socket, sys
from hpcgpu.agent.follower import FollowerConnection
from hpcgpu.agent.leader import ForcedEnd
from hpcgpu.agent.fork_server import ForkServer

async def refuse():
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            pass  # takes it for something else, as a connection may

async def lead():
    task = asyncio.create_task(refuse())
    await asyncio.sleep(0)
    forced.begin()

fork_server = ForkServer.fork()
print(fork_server.pid, flush=True)
follower = FollowerConnection(1, socket.socket(fileno=int(sys.argv[1])), 1, 2)
with ForcedEnd(fork_server, [follower], 0.5) as forced:
    asyncio.run(lead())
"""


def test_an_end_that_does_not_come_is_forced_and_said() -> None:
    """That of a task which cannot be cancelled. The followers hear a goodbye: none of them leads in its place."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        argv = [sys.executable, "-c", CODE, str(theirs.fileno())]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=scaled(60), pass_fds=[theirs.fileno()])
        assert done.returncode == os.EX_SOFTWARE, done.stderr
        assert "has not ended within 0.5 s; it is killed, and its workers" in done.stderr
        assert json.loads(ours.recv(256))["op"] == "end"
