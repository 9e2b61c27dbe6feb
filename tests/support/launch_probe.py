"""Watches the ranks that a launcher's command line starts."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpcgpu.model.allocation import World

PROBE, ME = "tests/support/launch_probe.py", ("@ME@",)
SETTLED_S = 1.5  # an mpirun that ends all when one dies has done so within 0.3 s (Open MPI 4 and 5, MPICH 5.0.2)
LIMIT_S = 40


def rank(host: str, port: int) -> None:
    """Say where this rank is, then do as told; the end of the watcher is the end of the rank."""

    from hpcgpu.launch.environment import read_rank

    facts = read_rank(os.environ)._asdict()
    place = {"host": socket.gethostname(), "cpus": sorted(os.sched_getaffinity(0))}
    place |= {"node": os.environ.get("SLURMD_NODENAME"), "gpus": os.environ.get("CUDA_VISIBLE_DEVICES")}
    with socket.create_connection((host, port), timeout=LIMIT_S) as s:
        s.sendall(json.dumps({**facts, **place}).encode() + b"\n")
        if s.recv(16) == b"die":
            os.kill(os.getpid(), signal.SIGKILL)


def watch(host: str, argv: list[str]) -> dict[str, Any]:
    with socket.create_server(("", 0)) as server:
        server.settimeout(LIMIT_S)
        me = [sys.executable, __file__, "--rank", host, str(server.getsockname()[1])]
        full = [word for part in argv for word in (me if part == "@ME@" else [part])]
        pipe = subprocess.PIPE
        launcher = subprocess.Popen(full, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True)
        try:
            ranks: dict[int, tuple[socket.socket, dict[str, Any]]] = {}
            while not ranks or len(ranks) < next(iter(ranks.values()))[1]["size"]:
                connection, _ = server.accept()
                facts = json.loads(connection.makefile().readline())
                assert facts["rank"] not in ranks, f"two ranks {facts['rank']}: {facts}"
                ranks[facts["rank"]] = connection, facts
            alive = kill_one(ranks)
            out, err = launcher.communicate(timeout=LIMIT_S)
        finally:
            launcher.kill()
    seen = [facts for _, (_, facts) in sorted(ranks.items())]
    return {"ranks": seen, "alive": alive, "returncode": launcher.returncode, "out": out, "err": err}


def kill_one(ranks: dict[int, tuple[socket.socket, dict[str, Any]]]) -> list[int]:
    """Let rank 1 die, return the ranks that are there a while after it, and end them."""
    ranks[1][0].sendall(b"die")
    select.select([ranks[1][0]], [], [], LIMIT_S)  # end of file: it is dead
    others = {s: number for number, (s, _) in ranks.items() if number != 1}
    waiting = set(others)
    while gone := select.select(waiting, [], [], SETTLED_S)[0]:
        waiting -= set(gone)
        if not waiting:
            break
    for s in waiting:
        s.sendall(b"bye")
    return sorted(others[s] for s in waiting)


def check(seen: dict[str, Any], world: World, hosts: list[str]) -> None:
    """Fail unless a test that ran this file saw the ranks of a world, unbound, with the extra one on the first host."""
    ranks = seen["ranks"]
    assert [(r["rank"], r["size"]) for r in ranks] == [(i, world.size) for i in range(world.size)]
    promised = Counter(dict.fromkeys(hosts, world.per_node))
    promised[hosts[0]] += world.extra
    assert Counter(r["host"] for r in ranks) == promised
    assert ranks[0]["host"] == hosts[0]
    free = set(range(os.cpu_count() or 1)) & os.sched_getaffinity(0)
    assert all(set(r["cpus"]) == free for r in ranks), "a rank is bound"


def others(world: World) -> list[int]:
    return [i for i in range(world.size) if i != 1]


if __name__ == "__main__":
    if sys.argv[1] == "--rank":
        rank(sys.argv[2], int(sys.argv[3]))
    else:
        print(json.dumps(watch(sys.argv[1], sys.argv[2:])))
