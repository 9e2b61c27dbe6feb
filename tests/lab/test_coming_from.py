"""The page for those who come from dask-jobqueue: what it shows runs."""

import shlex

import pytest
from lab import Lab
from pages import after, blocks
from waiting import scaled

JOBQUEUE = """
    import json, os, ssl, time
    from distributed import Client
    from dask_jobqueue import SLURMCluster
    import hpcgpu
    from hpcgpu.deploy.network.scheduler_file import TlsSocket

    ssl.SSLContext.sslsocket_class = TlsSocket  # CPython issue 148594, on Debian 13

    def until(condition):
        end = time.monotonic() + 90
        while not condition():
            assert time.monotonic() < end
            time.sleep(0.2)

    def names(client, count):
        until(lambda: len(client.scheduler_info(n_workers=-1)["workers"]) == len(cluster.observed) == count)
        return sorted(w["name"] for w in client.scheduler_info(n_workers=-1)["workers"].values())

    with SLURMCluster(
        cores=2, processes=2, memory="1GB", job_extra_directives=["--gres=gpu:2"], name="mine",
        worker_command="hpcgpu.worker", worker_extra_args=["--gpus", "sim:2x16MiB"],
        security=True, shared_temp_directory=os.getcwd(), log_directory="logs",
    ) as cluster, Client(cluster) as client:
        cluster.scale(jobs=2)
        facts = dict(
            names=names(client, 4),
            counts=[len(cluster.plan), len(cluster.requested), len(cluster.observed)],
            moved=hpcgpu.bindings(client).differences,
            limits=[w["memory_limit"] for w in client.scheduler_info(n_workers=-1)["workers"].values()],
            total=client.submit(sum, [1, 2, 3]).result(),
        )
        cluster.scale(jobs=1)
        facts["less"] = names(client, 2)
        until(lambda: os.popen("squeue -h").read().count("\\n") <= 1)
        cluster.adapt(minimum_jobs=2, maximum_jobs=2, interval="200ms")
        facts["more"] = names(client, 4)
        facts["still"] = [len(cluster.plan), len(cluster.requested), len(cluster.observed)]
    print("FACTS", json.dumps(facts))
"""


@pytest.mark.parametrize("diff", [0, 1], ids=["its cluster", "our cluster"])
def test_dask_jobqueue(slurm_lab: Lab, diff: int) -> None:
    done = slurm_lab.python(after(blocks("dask-jobqueue", "diff")[diff]), timeout=scaled(150))
    assert done.stdout.splitlines()[-1:] == ["6"], done.stderr


def test_slurm_runner(slurm_lab: Lab) -> None:
    slurm_lab.needs_pmix()
    slurm_lab.write("script.py", after(blocks("dask-jobqueue", "diff")[2]))
    done = slurm_lab.exec(slurm_lab.login, shlex.split(blocks("dask-jobqueue", "bash")[0]), timeout=scaled(150))
    assert (done.returncode, done.stdout) == (0, "6\n"), done.stderr


@pytest.mark.parametrize("page", ["sbatch", "nemo-curator"])
def test_a_job_script(slurm_lab: Lab, page: str) -> None:
    text = after(blocks(page, "diff")[0]).replace('--container-image="$IMAGE" ', "")  # the lab has no pyxis
    slurm_lab.write("job.sh", text)
    slurm_lab.write("my_script.py", "from distributed import Client\nwith Client() as c: print(len(c.nthreads()))\n")
    # not the errors: distributed warns there of a slow file system
    argv = ["sbatch", "--wait", "--time=5", "--output=coming.out", "--error=coming.err", "job.sh"]
    done = slurm_lab.exec(slurm_lab.login, argv, timeout=scaled(150))
    assert (done.returncode, slurm_lab.read("coming.out")) == (0, "8\n"), done.stderr + slurm_lab.read("coming.err")


def test_dask_jobqueue_scales_and_adapts_jobs_of_our_workers(slurm_lab: Lab) -> None:
    facts = slurm_lab.facts(JOBQUEUE, timeout=scaled(300))
    assert facts["names"] == ["mine-0-0", "mine-0-1", "mine-1-0", "mine-1-1"]
    assert facts["counts"] == facts["still"] == [4, 4, 4]
    assert facts["moved"] == {}
    assert max(facts["limits"]) <= 500_000_000 * 1.01
    assert facts["total"] == 6
    assert len(facts["less"]) == 2
    assert len({name[:-2] for name in facts["less"]}) == 1
    assert len(facts["more"]) == 4
