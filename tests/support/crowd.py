"""A thousand workers in one process: what they say to a scheduler when they register, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import psutil
from distributed.comm import Comm, CommClosedError, connect
from distributed.versions import get_versions

AT_ONCE = 50
JOB = "77"
PROGRAMS = {
    "sbatch": f"cat > /dev/null; echo x >> {{folder}}/submitted; echo {JOB}",
    "squeue": 'case " $* " in *--jobs=*) ;; *) exit;; esac; [ ! -e {folder}/cancelled ] || '
    "{{ echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1; }}; "
    f'for i in $(seq 0 $(({{count}} - 1))); do echo "{JOB}_$i|RUNNING|0|N/A||None|"; done',
    "sacct": "exit 0",
    "scancel": "touch {folder}/cancelled",
}
METRICS = {
    "bandwidth": {"total": 100_000_000, "workers": {}, "types": {}},
    "digests_total_since_heartbeat": {},
    "memory": 0,
    "managed_bytes": 0,
    "spilled_bytes": {"memory": 0, "disk": 0},
}


class Crowd:
    """The process of the workers."""

    def __init__(self, cluster: Any) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0}
        self._process = subprocess.Popen([sys.executable, __file__], **pipes)
        self._process.stdin.write(pickle.dumps((cluster.scheduler_comm.address, cluster.security)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=120)

    def join(self, names: Sequence[str]) -> None:
        """Have workers of these names register; returns when the scheduler has welcomed all."""
        self._say(f"join {' '.join(names)}")

    def leave(self) -> None:
        """Have all of them end their connections."""
        self._say("leave")

    def _say(self, line: str) -> None:
        self._process.stdin.write(f"{line}\n".encode())
        assert self._process.stdout.readline() == b"done\n", "the workers have ended"


def write_slurm(folder: Path, count: int) -> None:
    """Write the programs of a Slurm with one array of ``count`` jobs; it notes each submission in ``submitted``."""
    for name, text in PROGRAMS.items():
        (folder / name).write_text(f"#!/bin/sh\n{text.format(folder=folder, count=count)}\n")
        (folder / name).chmod(0o755)


def tree_cpu_s(root: str) -> float:
    """Return the CPU seconds of a process and of all below it that live, by the nanosecond."""
    tree = [int(root), *(process.pid for process in psutil.Process(int(root)).children(recursive=True))]
    threads = (thread for pid in tree for thread in Path(f"/proc/{pid}/task").glob("*/schedstat"))
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


async def register(address: str, arguments: dict[str, Any], name: str, port: int) -> Comm:
    """Connect as distributed's Worker does (2026.8.0, ``_register_with_scheduler``): again when it is turned away."""
    comm = None
    while comm is None:
        try:
            comm = await connect(address, **arguments)
        except OSError:
            await asyncio.sleep(0.1)
    message = {"op": "register-worker", "reply": False, "status": "running", "nthreads": 1, "nanny": None}
    message |= {"name": name, "server_id": name, "stimulus_id": f"worker-connect-{name}", "now": time.time()}
    message |= {"address": f"tls://127.0.0.1:{port}", "pid": port}  # a port on which no process listens
    message |= {"resources": {}, "services": {}, "extra": {}, "memory_limit": 1 << 30, "local_directory": ""}
    message |= {"versions": get_versions(), "metrics": METRICS}
    await comm.write(message, serializers=["msgpack"])
    answer = await comm.read(deserializers=["msgpack"])
    assert answer["status"] == "OK", answer
    return comm


async def part(comm: Comm) -> None:
    """Leave as workers do: the scheduler hangs up."""
    await comm.write({"op": "close-stream"})
    with contextlib.suppress(CommClosedError):
        while True:
            await comm.read()


async def run(address: str, arguments: dict[str, Any], lines: Callable[[], bytes]) -> None:
    comms: list[Comm] = []
    while line := await asyncio.to_thread(lines):
        verb, *names = line.decode().split()
        if verb == "join":
            limit = asyncio.Semaphore(AT_ONCE)

            async def one(name: str, port: int, limit: asyncio.Semaphore = limit) -> Comm:
                async with limit:
                    return await register(address, arguments, name, port)

            comms += await asyncio.gather(*(one(name, 1024 + i) for i, name in enumerate(names)))
        else:
            await asyncio.gather(*map(part, comms))
            comms.clear()
        print("done", flush=True)


if __name__ == "__main__":
    where, security = pickle.load(sys.stdin.buffer)  # noqa: S301 - from our parent
    asyncio.run(run(where, security.get_connection_args("worker"), sys.stdin.buffer.readline))
