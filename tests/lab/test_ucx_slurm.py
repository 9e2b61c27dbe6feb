"""UCX between nodes: a gang, a cluster that grows, and the template, over the containers' network."""

import json
import shlex
import textwrap

import pytest
from lab import CHECKOUT, NETWORK, Lab, LabUnavailable
from waiting import scaled

PYTHON = "/home/hpc/ucx/bin/python"
SEEN = """
    import json, os, time
    from distributed import Client, wait
    from hpcgpu import SLURMGPUCluster, bindings
    def seen(dask_worker):
        import ucxx
        return os.uname().nodename, os.environ["UCX_NET_DEVICES"], ucxx.get_config()["NET_DEVICES"]
    given = dict(gpus="sim:2", protocol="ucx", interface="eth0", env={"UCX_NET_DEVICES": "eth0"}, walltime="00:10:00")
    def facts(client):
        workers = client.run(seen)
        by_node = {node: address for address, (node, *_) in workers.items()}
        first, *_, last = (by_node[node] for node in sorted(by_node))
        held = client.submit(lambda: bytes(32 << 20), workers=[first], pure=False)
        size = client.submit(len, held, workers=[last]).result(timeout=60)
        return {"workers": {a: list(w) for a, w in workers.items()}, "size": size, "last": last, "first": first,
                "scheduler": client.scheduler.address, "wrong": bindings(client).differences}
"""


@pytest.fixture
def ucx(slurm_lab: Lab) -> Lab:
    """The lab with the environment of ``make ucx``, which lies in the checkout and is of the lab's own Python."""
    try:
        slurm_lab.lend(".venv-ucx", "ucx", ("distributed_ucxx", "ucxx"))
    except LabUnavailable as error:
        pytest.skip(f"{error} (make ucx)")
    return slurm_lab


def run(lab: Lab, code: str) -> dict:
    return lab.facts(textwrap.dedent(SEEN) + textwrap.dedent(code), PYTHON, timeout=scaled(200))


def check(facts: dict, nodes: int) -> None:
    """All that is said and moved goes over the planned interface, by UCX."""
    addresses = [facts["scheduler"], *facts["workers"]]
    assert all(address.startswith(f"ucx://{NETWORK}.") for address in addresses)
    assert len({node for node, *_ in facts["workers"].values()}) == nodes
    assert {tuple(devices) for _, *devices in facts["workers"].values()} == {("eth0", "eth0")}
    assert facts["first"].rpartition(":")[0] != facts["last"].rpartition(":")[0]
    assert facts["size"] == 32 << 20
    assert facts["wrong"] == {}


def test_a_gang_of_two_nodes(ucx: Lab) -> None:
    code = """
        with SLURMGPUCluster(nodes=2, **given) as cluster, Client(cluster) as client:
            print("FACTS", json.dumps(facts(client)))
    """
    check(run(ucx, code), nodes=2)


def test_a_cluster_that_grows_and_shrinks(ucx: Lab) -> None:
    """The job that goes hands its data over, by UCX."""
    code = """
        given |= dict(shape="elastic", nodes=1, job_extra_directives=["--exclusive"])
        with SLURMGPUCluster(**given) as cluster, Client(cluster) as client:
            cluster.scale(jobs=1)  # beside the one that has the scheduler
            cluster.wait_for_workers(4, timeout=120)
            before = facts(client)
            data = client.map(lambda i: bytes([i]) * (1 << 20), range(8), workers=[before["last"]], pure=False)
            wait(data, timeout=60)
            cluster.scale(jobs=0)
            while (workers := client.nthreads()).keys() & {before["last"]}:
                time.sleep(0.1)
            assert len(workers) <= 3
            before["kept"] = [(block[0], len(block)) for block in client.gather(data)]
            print("FACTS", json.dumps(before))
    """
    facts = run(ucx, code)
    check(facts, nodes=2)
    assert facts["kept"] == [[i, 1 << 20] for i in range(8)]


def test_the_template(ucx: Lab) -> None:
    code = """
        with Client() as client:
            print(json.dumps(facts(client)))
    """
    ucx.write("with-ucx.py", textwrap.dedent(SEEN) + textwrap.dedent(code))
    ours = ["--protocol", "ucx", "--gpus", "sim:2", "--interface", "eth0", "--env", "UCX_NET_DEVICES=eth0"]
    sbatch = ["sbatch", "--parsable", "--ntasks-per-node=2", "--output=with-ucx.out"]
    argv = [*sbatch, f"{CHECKOUT}/jobscripts/slurm.sbatch", *ours, "with-ucx.py"]
    done = ucx.exec(ucx.login, ["sh", "-c", f"PATH=~/ucx/bin:$PATH {shlex.join(argv)}"], check=True)
    facts = ucx.wait_job(done.stdout.strip())
    log = ucx.read("with-ucx.out")
    assert facts["JobState"] == "COMPLETED", log
    check(json.loads(next(line for line in log.splitlines() if line.startswith("{"))), nodes=2)
