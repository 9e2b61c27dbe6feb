"""The guard of a run: wait until its client is dead, then end all jobs that it left.

``python -m hpcgpu.deploy.jobs.guard FOLDER PID START_TIME``, in a session of its own, so that no signal of the client's
terminal reaches it. It waits for the end of a process and nothing else: everything else is imported after.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from hpcgpu.host import pids

if TYPE_CHECKING:
    from pathlib import Path

    from hpcgpu.deploy.jobs.record import Process
    from hpcgpu.model import Started


def start(folder: Path, client: Process) -> Started:
    """Start the guard of a run; :func:`hpcgpu.host.run.end` ends it."""
    from hpcgpu.host import process, run
    from hpcgpu.model import Command

    argv = process.python_argv("hpcgpu.deploy.jobs.guard", str(folder), str(client.pid), str(client.start_time))
    return run.start(Command(argv), log=str(folder / "guard.log"))


def main(folder: str, pid: str, start_time: str) -> None:
    """Wait for the client's end, then end its jobs, unless it has closed or detached its cluster."""
    pids.wait_for_end(int(pid), int(start_time))
    if os.path.isdir(folder) and "detached" not in os.listdir(folder):
        import asyncio
        from pathlib import Path

        asyncio.run(_abandon(Path(folder)))


async def _abandon(folder: Path) -> None:
    """End the remaining jobs, however many tries it takes: no other process does."""
    from hpcgpu.deploy.jobs.runs import abandon
    from hpcgpu.supervise import tasks

    async def once() -> bool:
        try:
            await abandon(folder)
        except FileNotFoundError:
            if await tasks.to_thread(folder.exists):
                raise
        return True  # also if another process has stopped the run, and removed its folder

    await tasks.run_forever(once, f"the end of the run in {folder}").finished()


if __name__ == "__main__":
    main(*sys.argv[1:])
