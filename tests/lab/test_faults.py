"""Jobs that end, wait, stop or run out of time under a cluster that works: nothing is lost, and all are there again."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from faults import faulty
from lab import ENDED, PATIENCE_S, Lab
from waiting import until

pytestmark = pytest.mark.timeout(400)
RIGHT = {"right": True, "lost": {}}
SLOW = """
import os
RAN = os.path.expanduser("~/slow.ran")
open(RAN, "w").close()

class Slow:
    def __reduce__(self):
        time.sleep(0.4)
        return Slow, ()

def make(i):
    with open(RAN, "a") as file:
        print(i, file=file)
    return Slow()

async def steal_none(dask_scheduler):  # the other job's idle worker would take tasks of this one's
    await dask_scheduler.extensions["stealing"].stop()
"""


def test_a_cancelled_job_hands_over_its_data_and_is_replaced(slurm_lab: Lab) -> None:
    with faulty(slurm_lab, jobs=3) as run:
        run.do("start()")
        before = run.members()
        slurm_lab.exec(slurm_lab.login, ["scancel", before[0]], check=True)
        assert run.results() == RIGHT
        run.until("[row.id for row in cluster.jobs.gone]", lambda gone: gone == before[:1])
        run.whole_again()
        after = run.members()
        assert len(after) == 3
        assert before[0] not in after


@contextmanager
def epilog(lab: Lab) -> Iterator[Callable[[], None]]:
    """Have every job be followed by a program that waits, so that it is COMPLETING, until what is yielded is called."""
    script, line, held = "/etc/slurm/epilog", "/etc/slurm/slurm.conf", "/etc/slurm/held"
    waits = f"#!/bin/sh\\nwhile [ -e {held} ]; do sleep 0.2; done\\n"

    def everywhere(command: str) -> None:
        for machine in (lab.login, *lab.nodes):
            lab.root("sh", "-c", command, container=machine)

    everywhere(f"touch {held}; printf '{waits}' > {script}; chmod 755 {script}; echo Epilog={script} >> {line}")
    lab.root("scontrol", "reconfigure")
    try:
        yield lambda: everywhere(f"rm -f {held}")
    finally:
        everywhere(f"rm -f {held}; sed -i /^Epilog=/d {line}")
        lab.root("scontrol", "reconfigure")


def test_a_slow_epilog_is_said_and_keeps_nobody_from_closing(slurm_lab: Lab) -> None:
    with epilog(slurm_lab) as go_on, faulty(slurm_lab, jobs=2, scheduler="here") as run:
        ended, stays = run.members()
        slurm_lab.exec(slurm_lab.login, ["scancel", ended], check=True)
        run.until("str(cluster.jobs)", lambda table: "in state COMPLETING" in table)
        go_on()
        run.until("[row.id for row in cluster.jobs.gone]", lambda gone: gone == [ended])
        run.whole_again()
        members = run.members()
        assert stays in members
        assert len(members) == 2


def submitted(lab: Lab) -> set[str]:
    """Return all jobs that Slurm remembers, ended ones too."""
    seen = lab.exec(lab.login, ["squeue", "--noheader", "--array", "--states=all", "--format=%i"], check=True)
    return set(seen.stdout.split())


def test_adapt_replaces_a_cancelled_job_once_and_shrinks(slurm_lab: Lab) -> None:
    before = submitted(slurm_lab)
    with faulty(slurm_lab, jobs=1, scheduler="here") as run:
        # more than is done before the job is missed, however slow the nodes are; few, for scheduler and client, too
        run.do("TASKS, TASK_S = 200, 3")
        run.do("cluster.adapt(minimum=1, maximum=3, interval='1s', wait_count=3)")
        run.do("start()")
        run.until("len(client.scheduler_info(n_workers=-1)['workers'])", lambda n: n == 3)
        victim = run.members()[0]
        slurm_lab.exec(slurm_lab.login, ["scancel", victim], check=True)
        run.until("[row.id for row in cluster.jobs.gone]", lambda gone: gone == [victim])
        assert run.ask("[tasks[-1].status, client.status]") == ["pending", "running"]
        run.whole_again()
        run.do("client.cancel(tasks[15:]); del tasks[15:]; TASKS = 15")
        assert run.results() == RIGHT
        assert len(submitted(slurm_lab) - before) == 4  # three, and one for the one that was cancelled
        run.until("cluster.wanted_workers", lambda n: n == 1)
        run.whole_again()
        run.until("len(cluster.jobs)", lambda n: n == 2)  # the scheduler's, which is no job of Slurm's, and one
        assert [job for job, state in slurm_lab.jobs().items() if state == "RUNNING"] == run.members()
        assert run.results() == RIGHT
        assert len(submitted(slurm_lab) - before) == 4


def test_a_preempted_job_hands_over_and_returns_under_its_id(slurm_lab: Lab) -> None:
    with faulty(slurm_lab, jobs=4, scheduler="here", queue="low") as run:
        run.do("start()")
        victim = next(job for job in run.members() if run.node_of(job) == "node3")
        other = slurm_lab.submit("#!/bin/bash\nsleep 5\n", "-phigh", "-wnode3", "--exclusive")
        assert run.results() == RIGHT
        assert int(slurm_lab.job(victim)["Restarts"]) == 1
        slurm_lab.wait_job(other)
        run.start_at_once(victim)
        run.whole_again()
        assert victim in run.members()
        assert run.ask(f"list(here({victim!r}).values())") == [f"{victim}-0r1"]


def test_a_preempted_job_moves_its_data_within_its_grace(slurm_lab: Lab) -> None:
    """Its values take long to pickle: more than the 4 s that it has without a GraceTime."""
    slurm_lab.root("scontrol", "update", "PartitionName=low", "GraceTime=60")
    try:
        with faulty(slurm_lab, jobs=2, scheduler="here", queue="low") as run:
            victim = run.members()[0]
            run.do(f"{SLOW}client.run_on_scheduler(steal_none)")
            run.do(f"there = dict(workers=list(here({victim!r})), allow_other_workers=True)")
            run.do("slow = client.map(make, range(12), pure=False, **there); wait(slow)")
            assert run.ask(f"all(set(who) <= set(here({victim!r})) for who in client.who_has(slow).values())")
            slurm_lab.submit("#!/bin/bash\nsleep 5\n", "-phigh", f"-w{run.node_of(victim)}", "--exclusive")

            def has_left() -> bool:  # since 24.05 Slurm requeues a job that ends within its GraceTime, too
                job = slurm_lab.job(victim)
                return job["JobState"] in ENDED or job["Restarts"] == "1"

            until(has_left, "it has left", limit_s=PATIENCE_S)
            run.do("wait(slow)")
            assert len(slurm_lab.read("slow.ran").split()) == 12  # none was computed again
    finally:
        slurm_lab.root("scontrol", "update", "PartitionName=low", "GraceTime=0")


def test_a_suspended_job_goes_on_where_it_was(slurm_lab: Lab) -> None:
    with faulty(slurm_lab, jobs=4, scheduler="here") as run:
        run.do("start()")
        job = run.members()[0]
        slurm_lab.root("scontrol", "suspend", job)
        run.until("sum(f.done() for f in tasks)", lambda done: done >= 25)
        slurm_lab.root("scontrol", "resume", job)
        assert run.results() == RIGHT
        run.whole_again()
        assert job in run.members()


def test_a_job_near_its_time_limit_hands_over_to_its_successor(slurm_lab: Lab) -> None:
    with faulty(slurm_lab, jobs=2, scheduler="here", walltime="00:02:00") as run:
        run.do("start()")
        before = run.members()
        run.until(f"[row.id for row in cluster.jobs.rows if row.id in {before}]", lambda left: not left)
        run.whole_again()
        assert run.results() == RIGHT
        assert {slurm_lab.job(job)["JobState"] for job in before} == {"COMPLETED"}


def test_a_job_that_stays_pending_is_said_with_slurms_reason(slurm_lab: Lab) -> None:
    with faulty(slurm_lab, jobs=2, scheduler="here") as run:
        run.do("cluster.scale(jobs=6)")
        run.until("str(cluster.jobs)", lambda table: table.count("PENDING (Resources") == 2)
        run.do("try:\n cluster.wait_for_workers(6, timeout=2)\nexcept TimeoutError as e:\n why = str(e)")
        assert "not 6 workers within 2 s: 2 PENDING (Resources" in run.ask("why")
        run.do("start()")
        assert run.results() == RIGHT
        run.do("cluster.scale(jobs=4)")
        run.until("len(cluster.jobs)", lambda n: n == 5)
