"""A cluster with work and data in the Slurm lab, seen from outside, and what is done to the nodes under it."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from typing import Any, Self

from lab import NUMBER, PATIENCE_S, Lab

CLIENT = """
import json, os, sys, time
import numpy as np
from distributed import Client, wait
from hpcgpu import SLURMGPUCluster
from hpcgpu.errors import HpcGpuError

TASKS, TASK_S, PARTS = 40, 0.3, 8
answers = sys.stdout
sys.stdout = sys.stderr

def answer(value):
    print(json.dumps(value), file=answers, flush=True)

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

options, scale = json.loads(sys.argv[1])
with SLURMGPUCluster(**options) as cluster, Client(cluster) as client:
    if scale is not None:
        cluster.scale(jobs=scale)
        cluster.wait_for_workers(cluster.wanted_workers, timeout=120)
    answer("ready")
    for line in sys.stdin:
        kind, text = json.loads(line)
        try:
            answer(exec(text) if kind == "do" else eval(text))
        except Exception as e:
            answer({"error": f"{type(e).__name__}: {e}"})
answer("closed")
"""


class Faulty:
    """A client in the lab that answers questions while its cluster suffers."""

    def __init__(self, lab: Lab, jobs: int | None = None, where: str = "", **options: Any) -> None:
        self.lab = lab
        # one simulated GPU on each node and five cores for it, so that a node has one job
        options = {"gpus": "sim:1", "cores_per_gpu": 5, "client_grace": 60, "dashboard": False, **options}
        if jobs is not None:
            options["shape"] = "elastic"
        lab.write("faulty.py", CLIENT)
        argv = ["python", "-u", "faulty.py", json.dumps([options, jobs])]
        self._where = where or lab.login
        self._process = lab.start(self._where, argv, timeout=2 * PATIENCE_S)

    def __enter__(self) -> Self:
        self._hear("ready")
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is not None:  # a scheduler beside the client writes to its run's folder, which goes with it
            print(self.lab.exec(self._where, ["sh", "-c", "tail -n 60 ~/.hpcgpu/runs/*/hpcgpu.log"]).stdout)
        try:
            out, err = self._process.communicate(timeout=90)
        except subprocess.TimeoutExpired:
            self._process.kill()
            out, err = self._process.communicate()
        print(err)
        assert error[0] is not None or '"closed"' in out, f"{out}{err}"

    def ask(self, expression: str) -> Any:
        """Return what an expression is in the client."""
        return self._say("ask", expression)

    def do(self, statement: str) -> None:
        """Have the client do something."""
        self._say("do", statement)

    def until(self, expression: str, condition: Callable[[Any], bool] = bool, patience_s: float = PATIENCE_S) -> Any:
        """Ask until the answer is the awaited one, and return it."""
        end = time.monotonic() + patience_s
        while not condition(answer := self.ask(expression)):
            assert time.monotonic() < end, f"{expression} is still {answer}; {self.ask('str(cluster.jobs)')}"
            time.sleep(0.2)
        return answer

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

    def _say(self, kind: str, text: str) -> Any:
        self._process.stdin.write(json.dumps([kind, text]) + "\n")
        self._process.stdin.flush()
        return self._hear(text)

    def _hear(self, about: str) -> Any:
        line = self._process.stdout.readline()
        assert line, f"the client ended at {about}: {self._process.communicate(timeout=60)}"
        answer = json.loads(line)
        assert not (isinstance(answer, dict) and "error" in answer), f"{about}: {answer}"
        return answer


def docker(*argv: str) -> None:
    subprocess.run(["docker", *argv], check=True, capture_output=True, timeout=60)


def container(node: str) -> str:
    return f"hpcgpu{NUMBER}-{node}"


def make_ready(lab: Lab) -> None:
    """Wait until Slurm gives every node to jobs; what it has drained or given up because of a fault is resumed."""
    end = time.monotonic() + PATIENCE_S
    states = ["no answer"]
    while not all(state.split()[-1] in ("idle", "mixed", "allocated") for state in states):
        assert time.monotonic() < end, f"nodes are not ready: {states}"
        for node in (state.split()[0] for state in states if state.split()[-1].startswith(("drain", "down"))):
            lab.exec(lab.login, ["scontrol", "update", f"NodeName={node}", "State=RESUME"], user="root")
        time.sleep(0.3)
        out = lab.exec(lab.login, ["sinfo", "-h", "-N", "-p", "main", "-o", "%N %T"]).stdout
        states = out.splitlines() or ["no answer"]
