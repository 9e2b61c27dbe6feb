"""A leader whose end does not come is ended, with all that it has started."""

from __future__ import annotations

import os
import subprocess
import sys

from waiting import scaled

CODE = """
import asyncio
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
with ForcedEnd(fork_server, 0.5) as forced:
    asyncio.run(lead())
"""


def test_an_end_that_does_not_come_is_forced_and_said() -> None:
    argv = [sys.executable, "-c", CODE]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=scaled(60))
    assert done.returncode == os.EX_SOFTWARE, done.stderr
    assert "has not ended within 0.5 s; it is killed, and its workers" in done.stderr
