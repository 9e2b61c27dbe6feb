"""A gang and elastic jobs of many nodes of this machine, which work, lose some nodes at once, and go on.

The nodes of a gang are namespaces with a host name of their own, those of elastic jobs are sessions. Only root sees and
ends all processes of a namespace.
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dask.array as da
import two_nodes
from distributed import Client, Future
from leaks import signal_all
from pbs_replay import Pbs
from waiting import scaled, until

from hpcgpu import PBSGPUCluster
from hpcgpu.errors import JobError

SIDE = 2**11
# A node is a group of processes of its own for the kernel, and has one core.
_BEFORE = "setsid taskset -c $((10#${{node#node}} % $(nproc))) sh -c '{less}; exec \"$@\"' node"
# It has a third of what the scheduler's node has: else 128 workers that start keep the scheduler from answering within
# 30 s.
_LESS = "echo 5 > /proc/self/autogroup"
# distributed's idle workers look at themselves 160 times a second by default (10, 20 and 100 ms, 2026.8.0).
DASK = {
    "COMM__TIMEOUTS__CONNECT": "120s",
    "WORKER__PROFILE__ENABLED": "False",
    "WORKER__MEMORY__MONITOR_INTERVAL": "2s",
    "ADMIN__TICK__INTERVAL": "1s",
    "ADMIN__SYSTEM_MONITOR__INTERVAL": "5s",
}
QUIET = [f"export DASK_DISTRIBUTED__{name}={value}" for name, value in DASK.items()]


@dataclass
class Trial:
    """One cluster of so many nodes with so many workers each; ``took_s`` has what each step took."""

    pbs: Pbs
    home: Path
    nodes: int
    each: int
    lost: int
    tasks: int
    many: bool = False  # so many that the scheduler needs more of this machine than a node
    took_s: dict[str, float] = field(default_factory=dict)

    @property
    def options(self) -> dict[str, Any]:
        scratch = {"local_directory": str(self.home / "scratch"), "death_timeout": scaled(300)}
        return {"gpus": f"sim:{self.each}x16MiB", "ranks": "node", "dashboard": False, **scratch}

    def gang(self) -> None:
        """Run a job of all nodes, started by pbs_tmrsh."""
        names = [f"node{i:04}" for i in range(1, self.nodes)]
        (self.home / "nodes").write_text("\n".join([os.uname().nodename, *names, ""]))
        two_nodes.write_tmrsh(self.home, _BEFORE.format(less=_LESS if self.many else ":"))
        more = {"launcher": "pbs_tmrsh", "rendezvous": "file"}
        more |= {"job_script_prologue": [f"export PBS_NODEFILE={self.home}/nodes", *QUIET]}
        with contextlib.ExitStack() as stack:
            with self.step("start"):
                cluster = stack.enter_context(PBSGPUCluster(nodes=self.nodes, **self.options, **more))
                client = stack.enter_context(Client(cluster))
                cluster.wait_for_workers(self.nodes * self.each)
            log = cluster.get_logs(scheduler=False, workers=False)["Cluster"]
            assert f"READY {self.nodes * self.each} workers on {self.nodes} nodes" in log  # of one address
            self.work(client)
            spaces, under_way = self.spaces(client), self.begin(client)
            left = (self.nodes - self.lost) * self.each
            with self.step("loss"):
                lost = [pid for name in names[-self.lost :] for pid in members(spaces[name])]
                signal_all(lost, signal.SIGKILL)
                until(lambda: count(client) == left, "the others are left", limit_s=100)
            with self.step("tasks under way"):
                assert client.gather(under_way) == list(range(len(under_way)))
            self.work(client, " after the loss")
            assert f"UP {left}/{self.nodes * self.each}" in str(cluster.jobs)
            try:
                cluster.wait_for_workers(self.nodes * self.each, timeout=scaled(100))
            except JobError as e:
                assert f"no more than {left} of {self.nodes * self.each} workers can be there. " in str(e)  # noqa: PT017
                assert ": its leader is lost, and its workers with it" in str(e)  # noqa: PT017
            else:
                raise AssertionError("workers of nodes that are lost have come")
            with self.step("end"):
                stack.close()
        self.check_end(set(names[-self.lost :]))

    def elastic(self) -> None:
        """Run as many jobs of one node, beside a scheduler here."""
        more = {"shape": "elastic", "scheduler": "here", "launcher": "fork"}
        more |= {"job_script_prologue": [*([_LESS.replace("self", "$$")] if self.many else []), *QUIET]}
        with contextlib.ExitStack() as stack:
            cluster = stack.enter_context(PBSGPUCluster(**self.options, **more))
            client = stack.enter_context(Client(cluster))
            with self.step("start"):
                cluster.scale(jobs=self.nodes)
                cluster.wait_for_workers(self.nodes * self.each)
            self.work(client)
            lost = [row.id for row in cluster.jobs.rows if row.has == "workers"][-self.lost :]
            under_way = self.begin(client)
            with self.step("loss"):
                signal_all([pid for job in lost for pid in self.pbs.processes(job)], signal.SIGKILL)
                until(lambda: {job.id for job in cluster.jobs.gone} == set(lost), "they are gone", limit_s=100)
            with self.step("tasks under way"):
                assert client.gather(under_way) == list(range(len(under_way)))
            with self.step("new jobs"):
                until(lambda: count(client) == self.nodes * self.each, "others have come", limit_s=300)
            self.work(client, " after the loss")
            with self.step("end"):
                stack.close()
        self.check_end(set())

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Note what a step took."""
        begin_s = time.monotonic()
        yield
        self.took_s[name] = time.monotonic() - begin_s
        print(name, round(self.took_s[name], 1), flush=True)  # shown where the trial fails

    def work(self, client: Client, when: str = "") -> None:
        """Run many small tasks, then an exchange of all workers with all."""
        with self.step(f"{self.tasks} tasks{when}"):
            results = client.gather(client.map(lambda i: i + 1, range(self.tasks), pure=False))
            assert sum(results) == self.tasks * (self.tasks + 1) // 2
        with self.step(f"p2p{when}"):
            x = da.arange(SIDE**2, chunks=SIDE * SIDE // self.nodes // 2).reshape(SIDE, SIDE)
            mixed = x.rechunk((SIDE, SIDE // self.nodes // 2), method="p2p")
            assert (mixed + 1).sum().compute() == SIDE**2 * (SIDE**2 + 1) // 2

    def begin(self, client: Client) -> list[Future]:
        """Have each worker do something for a while."""

        def slow(i: int) -> int:
            time.sleep(0.2)
            return i

        return client.map(slow, range(4 * self.nodes * self.each), pure=False)

    def spaces(self, client: Client) -> dict[str, str]:
        """Return the namespace of each node."""

        def here() -> tuple[str, str]:
            return os.uname().nodename, str(Path("/proc/self/ns/uts").readlink())

        return dict(client.run(here).values())

    def check_end(self, lost: set[str]) -> None:
        """See that no file is left, but on disks of nodes that are lost: the next start there removes those."""
        assert [*(self.home / ".hpcgpu").glob("*/*")] == []
        folders = {path.name.removeprefix(f"hpcgpu-run-{os.getuid()}-")[:-9] for path in self.scratch()}
        assert folders == lost

    def scratch(self) -> list[Path]:
        return [*(self.home / "scratch").iterdir()]


def members(space: str) -> list[int]:
    """Return all processes of a namespace."""
    out = []
    for link in Path("/proc").glob("[0-9]*/ns/uts"):
        with contextlib.suppress(OSError):
            out += [int(link.parts[2])] if str(link.readlink()) == space else []
    return out


def count(client: Client) -> int:
    return len(client.scheduler_info(n_workers=-1)["workers"])
