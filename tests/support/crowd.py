"""Thousands of workers in a few processes: what they say to a scheduler when they register, and nothing else."""

import asyncio
import contextlib
import itertools
import pickle
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import psutil
from distributed.comm import Comm, CommClosedError, connect
from distributed.versions import get_versions

AT_ONCE = 50
REFUSED: list[str] = []
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
    """The processes of the workers; each joins with so many ``connections``: its own, its nanny's, its heartbeat's.

    A nanny ends its connection when its worker has registered (distributed 2026.8.0, ``Nanny.start_unsafe``). Workers
    of hpcgpu have none for their heartbeats, and those of a node (``per_node``) have two of their leader, one of which
    is that of all its nannies.
    """

    def __init__(
        self, cluster: Any, processes: int = 1, connections: int = 1, at_once: int = AT_ONCE, per_node: int = 0
    ) -> None:
        self.refused = 0  # connections that a scheduler has closed before it welcomed them
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0}
        self._processes = [subprocess.Popen([sys.executable, __file__], **pipes) for _ in range(processes)]
        for i, process in enumerate(self._processes):
            sizes = connections, at_once // processes, per_node, f"tls://127.0.0.{i + 1}"
            process.stdin.write(pickle.dumps((cluster.scheduler_comm.address, cluster.security, *sizes)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.communicate(timeout=120)

    def join(self, names: Sequence[str]) -> None:
        """Have workers of these names register; returns when the scheduler has welcomed all."""
        parts = [names[i :: len(self._processes)] for i in range(len(self._processes))]
        self._say(*(f"join {' '.join(part)}" for part in parts))

    def beat(self, seconds: float, interval_s: float) -> None:
        """Have each of them send its heartbeat so often, for so long; each waits for its answer."""
        self._say(*[f"beat {seconds} {interval_s}"] * len(self._processes))

    def die(self, count: int) -> None:
        """Cut the connections of so many, as a node does that has lost its power."""
        self._say(*[f"die {count // len(self._processes)}"] * len(self._processes))

    def leave(self) -> None:
        """Have all of them end their connections."""
        self._say(*["leave"] * len(self._processes))

    def _say(self, *lines: str) -> None:
        for process, line in zip(self._processes, lines, strict=True):
            process.stdin.write(f"{line}\n".encode())
        for process in self._processes:
            answer, _, refused = process.stdout.readline().decode().partition(" ")
            assert answer == "done", "the workers have ended"
            self.refused += int(refused)


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


async def connect_again(address: str, arguments: dict[str, Any]) -> Comm:
    """Connect, again when it is turned away."""
    while True:
        try:
            return await connect(address, **arguments)
        except OSError:
            REFUSED.append(address)
            await asyncio.sleep(0.1)


async def register(address: str, arguments: dict[str, Any], name: str, own: str) -> Comm:
    message = {"op": "register-worker", "reply": False, "status": "running", "nthreads": 1, "nanny": None}
    message |= {"name": name, "server_id": name, "stimulus_id": f"worker-connect-{name}", "now": time.time()}
    # a port on which no process listens; a node for each worker: a scheduler looks at all of a new one's node
    message |= {"address": own, "pid": 1, "extra": {"hpcgpu": {"node": name}}}
    message |= {"resources": {}, "services": {}, "memory_limit": 1 << 30, "local_directory": ""}
    message |= {"versions": get_versions(), "metrics": METRICS}
    while True:  # as distributed's Worker (2026.8.0, _register_with_scheduler)
        comm = await connect_again(address, arguments)
        try:
            await comm.write(message, serializers=["msgpack"])
            answer = await comm.read(deserializers=["msgpack"])
        except OSError:
            REFUSED.append(address)
            continue
        assert answer["status"] == "OK", answer
        return comm


async def part(comm: Comm) -> None:
    """Leave as workers do: the scheduler hangs up."""
    await comm.write({"op": "close-stream"})
    with contextlib.suppress(CommClosedError):
        while True:
            await comm.read()


async def beat(comm: Comm, own: str, seconds: float, interval_s: float) -> None:
    """Send a worker's heartbeats, spread over the interval, by its stream or by a connection of their own."""
    end_s = time.monotonic() + seconds
    await asyncio.sleep(random.uniform(0, interval_s))
    while time.monotonic() < end_s:
        message = {"now": time.time(), "metrics": METRICS, "executing": {}, "extensions": {}}
        if own:
            await comm.write({"op": "heartbeat_worker", "address": own, "reply": True} | message)
            await comm.read()
        else:
            await comm.write({"op": "hpcgpu_heartbeat"} | message)
            while not any(answer.get("op") == "hpcgpu_heartbeat" for answer in await comm.read()):
                pass
        await asyncio.sleep(interval_s)


async def run(
    address: str, arguments: dict[str, Any], connections: int, at_once: int, per_node: int, host: str
) -> None:
    workers: list[tuple[str, list[Comm]]] = []
    leaders: list[Comm] = []
    limit = asyncio.Semaphore(at_once)
    nodes = asyncio.Semaphore(max(at_once // (per_node or 1), 1))

    async def one(name: str, own: str) -> tuple[str, list[Comm]]:
        async with limit:
            nannys = [await connect_again(address, arguments) for _ in range(connections > 1 and not per_node)]
            comms = [await register(address, arguments, name, own)]
            comms += [await connect_again(address, arguments) for _ in range(connections > 2)]
            for comm in nannys:
                await comm.close()
            return own, comms

    async def node(names: Sequence[str], first: int) -> list[tuple[str, list[Comm]]]:
        async with nodes:
            comms = [await connect_again(address, arguments) for _ in range(2 if per_node else 0)]
            joined = await asyncio.gather(*(one(name, f"{host}:{first + i}") for i, name in enumerate(names)))
            leaders.extend(comms[:1])
            for comm in comms[1:]:
                await comm.close()
            return joined

    while line := await asyncio.to_thread(sys.stdin.buffer.readline):
        verb, *words = line.decode().split()
        if verb == "join":
            first, size = 1024 + len(workers), per_node or 1
            parts = [(words[at : at + size], first + at) for at in range(0, len(words), size)]
            workers += itertools.chain(*await asyncio.gather(*itertools.starmap(node, parts)))
        elif verb == "beat":
            beats = (beat(c[-1], own if len(c) > 1 else "", *map(float, words)) for own, c in workers)
            await asyncio.gather(*beats)
        elif verb == "die":
            for _ in range(int(words[0])):
                for comm in workers.pop()[1]:
                    comm.abort()
        else:
            await asyncio.gather(*(part(comms[0]) for _, comms in workers))
            for comm in itertools.chain(leaders, *(comms for _, comms in workers)):
                comm.abort()
            workers.clear()
        print("done", len(REFUSED), flush=True)
        REFUSED.clear()


if __name__ == "__main__":
    where, security, *sizes = pickle.load(sys.stdin.buffer)  # noqa: S301 - from our parent
    asyncio.run(run(where, security.get_connection_args("worker"), *sizes))
