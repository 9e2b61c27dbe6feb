"""Two kinds of jobs on one scheduler, in two partitions of a real Slurm: none is of the wrong kind."""

import pytest
from faults import Faulty, faulty
from lab import Lab

pytestmark = pytest.mark.timeout(400)
QUICK = "minimum=0, maximum_jobs=2, interval='1s', wait_count=3"
RESOURCES = """
{w["name"].partition("-")[0]: sorted(w["resources"])
 for w in client.scheduler_info(n_workers=-1)["workers"].values()}
"""


def partitions(lab: Lab) -> dict[str, str]:
    """Return the partition of each job that Slurm remembers, ended ones too."""
    words = ["squeue", "--noheader", "--array", "--states=all", "--format=%i %P"]
    return dict(line.split() for line in lab.exec(lab.login, words, check=True).stdout.splitlines())


def check_workers(run: Faulty) -> None:
    """Each worker has the resource of its job's partition."""
    of_partition = {"main": ["GPU"], "low": ["cpu"]}
    queues = partitions(run.lab)
    for job, resources in run.ask(RESOURCES.strip().replace("\n", " ")).items():
        assert resources == of_partition[queues[job]], job


def test_pools_have_their_kind_under_adapt_and_scancel(slurm_lab: Lab) -> None:
    before = partitions(slurm_lab).keys()

    def submitted() -> list[str]:
        return sorted(queue for job, queue in partitions(slurm_lab).items() if job not in before)

    with faulty(slurm_lab, jobs=0, scheduler="here", queue="main", resources={"GPU": 1}) as run:
        run.do("pool = cluster.add_pool('cpu', queue='low', cpu_workers=2)")
        run.do(f"cluster.adapt({QUICK}); pool.adapt({QUICK})")
        run.do("sleeps = client.map(lambda i: time.sleep(3) or i, range(200), resources={'cpu': 1})")
        run.until("[job.workers for job in pool.jobs.rows]", lambda workers: workers == [2, 2])
        check_workers(run)
        victim = run.members()[0]
        slurm_lab.exec(slurm_lab.login, ["scancel", victim], check=True)
        run.until("[job.id for job in pool.jobs.gone]", lambda gone: gone == [victim])
        run.until("[job.workers for job in pool.jobs.rows]", lambda workers: workers == [2, 2])
        assert submitted() == ["low"] * 3
        run.do("client.cancel(sleeps[10:])")
        run.do("device = client.map(abs, range(4), resources={'GPU': 1})")
        assert run.ask("client.gather(device)") == [0, 1, 2, 3]
        check_workers(run)
        assert run.ask("client.gather(sleeps[:10])") == list(range(10))
        run.do("del sleeps, device")
        run.until("len(cluster.jobs)", lambda n: n == 1)  # the scheduler's, which is no job of Slurm's
        assert submitted() == ["low"] * 3 + ["main"]
