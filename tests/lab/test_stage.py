"""A staged launch on two nodes of Slurm: each has its copy of Python, sent by sbcast, until the run's end."""

import json

from lab import Lab
from waiting import scaled, until

SCRIPT = """
import json, os, sys
from distributed import Client
def place():
    import distributed
    return os.uname().nodename, sys.prefix, distributed.__file__
with Client() as c:
    c.wait_for_workers(4)
    print("FACTS", json.dumps([place(), *c.run(place).values()]))
"""
JOB = ("salloc", "--quiet", "-N2", "--ntasks-per-node=2", "--gpus-per-node=2", "-w", "node1,node2")


def copies(lab: Lab) -> str:
    return "".join(
        lab.root("sh", "-c", "ls -d /tmp/hpcgpu-stage-* || :", container=node) for node in ("node1", "node2")
    )


def test_each_node_of_a_slurm_job_has_its_copy(slurm_lab: Lab) -> None:
    launch = ("hpcgpu", "launch", "--gpus", "sim:2", "--environment", "stage")
    done = slurm_lab.python(SCRIPT, *JOB, *launch, timeout=scaled(400))
    print(done.stderr)
    places = json.loads(done.stdout.partition("FACTS")[2])
    assert {host for host, _, _ in places} == {"node1", "node2"}
    for _, prefix, module in places:
        assert prefix.startswith("/tmp/hpcgpu-stage-1000-node")
        assert module.startswith("/tmp/hpcgpu-stage-1000-node")
    assert "each node starts Python from a copy" in done.stderr
    assert "sbcast has not sent" not in done.stderr
    until(lambda: not copies(slurm_lab), "no copy is left on the nodes")
