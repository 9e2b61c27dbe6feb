"""The guard of a run: wait until its owner's process is dead, then end all jobs that it left.

``python -m hpcgpu.deploy.guard FOLDER PID START_TIME TOKEN``, in a session of its own, so that no signal of the
owner's terminal reaches it. It waits for the end of a process and nothing else: everything else is imported after.
"""

from __future__ import annotations

import os
import sys

from hpcgpu.host import process


def main(folder: str, pid: str, start_time: str, token: str) -> None:
    """Wait for the owner's end, then end its jobs, unless it has closed or detached its cluster."""
    process.wait_for_end(int(pid), int(start_time))
    if os.path.isdir(folder) and "detached" not in os.listdir(folder):
        import asyncio
        from pathlib import Path

        from hpcgpu.deploy.jobs.abandoned import abandon

        asyncio.run(abandon(Path(folder), token))


if __name__ == "__main__":
    main(*sys.argv[1:])
