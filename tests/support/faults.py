"""A cluster with work and data in the Slurm lab, seen from outside, and what is done to the nodes under it."""

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from clients import Client
from lab import NUMBER, Lab
from waiting import until

CLIENT = """
import time
import numpy as np
from distributed import wait

TASKS, TASK_S, PARTS = 40, 0.3, 8

def work(i, part):
    time.sleep(TASK_S)
    return i + int(part.sum())

def start():
    # data that can be computed again, data of which this is the only copy, and tasks that need both
    globals()["scattered"] = client.scatter([np.full(1000, i) for i in range(PARTS)], hash=False)
    globals()["computed"] = client.map(np.full, [1000] * PARTS, range(PARTS), pure=False)
    wait(computed)
    globals()["tasks"] = [client.submit(work, i, computed[i % PARTS], pure=False) for i in range(TASKS)]

def here(job):
    # the job's workers: their names by their addresses
    workers = client.scheduler_info(n_workers=-1)["workers"]
    return {address: w["name"] for address, w in workers.items() if w["name"].startswith(f"{job}-")}

def only_on(job):
    # how many of the scattered parts no other job has
    return sum(set(client.who_has([f])[f.key]) <= set(here(job)) for f in scattered)

def results():
    # what became of all of it; an error is named
    expected = [i + 1000 * (i % PARTS) for i in range(TASKS)]
    right = client.gather(tasks) == expected
    again = [int(part[0]) for part in client.gather(computed)] == list(range(PARTS))
    lost = {}
    for i, future in enumerate(scattered):
        try:
            assert int(future.result(timeout=20)[0]) == i
        except Exception as e:
            lost[i] = f"{type(e).__name__}: {e}"
    return dict(right=right and again, lost=lost)
"""


class Faulty:
    """A client in the lab that answers questions while its cluster suffers."""

    def __init__(self, lab: Lab, client: Client) -> None:
        self.lab, self.ask, self.do = lab, client, client

    def until(self, expression: str, condition: Callable[[Any], bool] = bool) -> None:
        """Ask until the answer is the awaited one."""
        shown = lambda: self.ask(f"{expression}, str(cluster.jobs)")  # noqa: E731
        until(lambda: condition(self.ask(expression)), expression, limit_s=240, every_s=0.2, shown=shown)

    def members(self) -> list[str]:
        """Return the ids of the jobs that come and go."""
        return self.ask("[row.id for row in cluster.jobs.rows if 'scheduler' not in row.has]")

    def node_of(self, job: str) -> str:
        return self.lab.job(job)["NodeList"]

    def hosts(self, job: str) -> list[str]:
        """Return the nodes of a job, the first one first."""
        nodes = ["scontrol", "show", "hostnames", self.node_of(job)]
        return self.lab.exec(self.lab.login, nodes, check=True).stdout.split()

    def results(self) -> Any:
        """Wait for all tasks; return whether they are right, and the errors of lost data."""
        return self.ask("results()")

    def start_at_once(self, job: str) -> None:
        """Spare a requeued job the two minutes for which Slurm holds it."""
        self.until("str(cluster.jobs)", lambda table: "PENDING" in table)
        self.lab.root("scontrol", "update", f"JobId={job}", "StartTime=now")

    def whole_again(self) -> None:
        """Wait until as many workers are there as are wanted."""
        counts = "[len(client.scheduler_info(n_workers=-1)['workers']), cluster.wanted_workers]"
        self.until(counts, lambda n: n[0] == n[1])


@contextmanager
def faulty(lab: Lab, jobs: int | None = None, where: str = Lab.login, **options: Any) -> Iterator[Faulty]:
    """Start a cluster, one of ``jobs`` that come and go or a gang, and close it when all has gone well."""
    # one simulated GPU on each node and five cores for it, so that a node has one job
    options = {"gpus": "sim:1", "cores_per_gpu": 5, "client_grace": 60, "dashboard": False, **options}
    options |= {} if jobs is None else {"shape": "elastic"}
    with lab.client(where) as client:
        try:
            client(f"{CLIENT}\ncluster = SLURMGPUCluster(**{options}); client = Client(cluster)")
            if jobs is not None:
                client(f"cluster.scale(jobs={jobs}); cluster.wait_for_workers(cluster.wanted_workers, timeout=120)")
            yield Faulty(lab, client)
            client("client.close(); cluster.close()")
        except BaseException:  # a scheduler beside the client writes to its run's folder, which goes with it
            print(lab.exec(where, ["sh", "-c", "tail -n 60 ~/.hpcgpu/runs/*/hpcgpu.log"]).stdout)
            raise


def docker(*argv: str) -> None:
    """Run docker; again where runc was "unable to freeze" all processes, as 1.1.5 was once on a busy machine."""

    def done() -> bool:
        ended = subprocess.run(["docker", *argv], capture_output=True, text=True, timeout=60)
        assert ended.returncode == 0 or "unable to freeze" in ended.stderr, ended.stderr
        return ended.returncode == 0

    until(done, f"docker {' '.join(argv)}")


def container(node: str) -> str:
    return f"hpcgpu{NUMBER}-{node}"


def make_ready(lab: Lab) -> None:
    """Wait until Slurm gives every node to jobs; what it has drained or given up because of a fault is resumed."""

    def states() -> list[str]:
        return lab.exec(lab.login, ["sinfo", "-h", "-N", "-p", "main", "-o", "%N %T"]).stdout.splitlines()

    def ready() -> bool:
        nodes = [state.split() for state in states()]
        for node in (name for name, state in nodes if state.startswith(("drain", "down"))):
            lab.exec(lab.login, ["scontrol", "update", f"NodeName={node}", "State=RESUME"], user="root")
        return bool(nodes) and {state for _, state in nodes} <= {"idle", "mixed", "allocated"}

    until(ready, "all nodes are ready", limit_s=240, every_s=0.3, shown=states)


@contextmanager
def fault(lab: Lab, bad: tuple[str, ...], good: tuple[str, ...]) -> Iterator[None]:
    """Have docker do one thing, and at the end the other; then wait until Slurm gives all nodes to jobs again."""
    docker(*bad)
    try:
        yield
    finally:
        docker(*good)
        make_ready(lab)
