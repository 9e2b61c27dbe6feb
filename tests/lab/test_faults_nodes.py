"""Nodes and Slurm's daemons that fail under a cluster that works: what can be computed is, what is lost is named."""

import pytest
from faults import Faulty, container, fault, faulty
from lab import Lab
from waiting import until

pytestmark = pytest.mark.timeout(400)
RIGHT = {"right": True, "lost": {}}
NODE = container("node3")
CONTROLLER = container(Lab.login)
IN_NODE = ("exec", "-u", "root", NODE)
POWER = (("kill", NODE), ("start", NODE))
NETWORK = (
    (*IN_NODE, "sh", "-c", "iptables -A INPUT ! -i lo -j DROP; iptables -A OUTPUT ! -o lo -j DROP"),
    (*IN_NODE, "sh", "-c", "iptables -F INPUT; iptables -F OUTPUT"),
)
FROZEN = (("pause", NODE), ("unpause", NODE))
AWAY = ("stop", "-t", "20", CONTROLLER), ("start", CONTROLLER)
ELSEWHERE = {"where": "node4", "job_extra_directives": ["--exclude=node4"]}  # the client is not to die with slurmctld


def until_named(run: Faulty, job: str, node: str) -> None:
    """Wait until the table of jobs names the lost node with that job, also when it is gone."""
    run.until(
        f"[row.text for row in (*cluster.jobs.rows, *cluster.jobs.gone) if row.id == {job!r}]",
        lambda texts: any(f"{node} {state}" in text for text in texts for state in ("is down: Not", "does not answer")),
    )


def on_node3(run: Faulty) -> str:
    return next(job for job in run.members() if run.node_of(job) == "node3")


@pytest.mark.parametrize(
    ("loss", "requeue"), [(POWER, True), (NETWORK, False), (FROZEN, True)], ids=["powered-off", "cut-off", "frozen"]
)
def test_a_lost_node(slurm_lab: Lab, loss: tuple[tuple[str, ...], tuple[str, ...]], requeue: bool) -> None:
    extra = [] if requeue else ["--no-requeue"]  # Slurm's default is to start the job of a lost node again
    with faulty(slurm_lab, jobs=3, scheduler="here", job_extra_directives=extra) as run:
        run.do("start()")
        job = on_node3(run)
        alone = run.ask(f"only_on({job!r})")
        with fault(slurm_lab, *loss):
            results = run.results()
            assert results["right"]
            assert len(results["lost"]) == alone
            until_named(run, job, "node3")
            if requeue:
                run.start_at_once(job)
            run.whole_again()
            assert (job in run.members()) is requeue


def test_a_node_with_a_silent_slurmd_works_until_slurm_gives_up(slurm_lab: Lab) -> None:
    bad, good = ((*IN_NODE, "pkill", f"-{sig}", "-x", "slurmd") for sig in ("STOP", "CONT"))
    with faulty(slurm_lab, jobs=3, scheduler="here") as run:
        run.do("start()")
        job = on_node3(run)
        with fault(slurm_lab, bad, good):
            assert run.results() == RIGHT
            assert run.ask(f"list(here({job!r}).values())") == [f"{job}-0"]
            run.until(f"here({job!r})", lambda workers: not workers)  # before slurmd, back, kills all at once
            facts = slurm_lab.job(job)
            assert (facts["JobState"], facts["Restarts"]) == ("PENDING", "1"), facts
            until_named(run, job, "node3")  # where it was is known, though Slurm does not say it any more
            assert run.results() == RIGHT
        # Begun beside its old step, it has its node drained ("Duplicate jobid"), and once slurmctld of 24.11.5 crashed.
        until(lambda: not slurm_lab.exec("node3", ["pgrep", "-x", "slurmstepd"]).stdout, "slurmd, back, ends its step")
        run.start_at_once(job)
        run.whole_again()
        assert run.results() == RIGHT


@pytest.mark.parametrize("which", [0, 1], ids=["first", "another"])
def test_a_gang_that_lost_a_node_is_back_when_slurm_restarts_it(slurm_lab: Lab, which: int) -> None:
    with faulty(slurm_lab, nodes=2) as run:
        run.do("start()")
        job = run.ask("cluster.job_id")
        lost = run.hosts(job)[which]
        with fault(slurm_lab, ("kill", container(lost)), ("start", container(lost))):
            slurm_lab.wait_job(job, {"PENDING"})
            until_named(run, job, lost)
            run.start_at_once(job)
            run.until("str(cluster.jobs)", lambda table: "UP 2/2" in table)
            assert lost not in run.hosts(job)
            assert run.ask("Client(cluster).submit(sum, [1, 2]).result(timeout=60)") == 3
            assert "pending" not in run.ask("[f.status for f in tasks]")


def test_a_gang_without_kill_goes_on_without_a_lost_node(slurm_lab: Lab) -> None:
    with faulty(slurm_lab, nodes=2, job_extra_directives=["--no-kill"]) as run:
        run.do("start()")
        job = run.ask("cluster.job_id")
        first, lost = run.hosts(job)
        alone = run.ask(f"only_on({lost!r})")
        with fault(slurm_lab, ("kill", container(lost)), ("start", container(lost))):
            until(lambda: run.hosts(job) == [first], "the job has its first node alone", limit_s=240, every_s=0.2)
            results = run.results()
            assert results["right"]
            assert len(results["lost"]) == alone
            assert "UP 1/2" in run.ask("str(cluster.jobs)")


def test_slurmctld_is_away_while_the_cluster_grows(slurm_lab: Lab) -> None:
    with faulty(slurm_lab, jobs=1, scheduler="here", **ELSEWHERE) as run:
        run.do("start()")
        with fault(slurm_lab, *AWAY):
            run.do("import threading; scaling = threading.Thread(target=cluster.scale, kwargs={'jobs': 3})")
            run.do("scaling.start()")
            assert run.results() == RIGHT
            assert run.ask("scaling.is_alive()")
        run.until("not scaling.is_alive()")
        run.whole_again()
        assert len(run.members()) == 3


def test_slurmctld_is_away_while_a_gang_is_closed(slurm_lab: Lab) -> None:
    """What its script has left says that it has ended; squeue would take 40 s to say that it cannot know."""
    version = slurm_lab.exec(slurm_lab.login, ["sinfo", "--version"], check=True).stdout.split()[-1]
    # That of 26.05.5 tells slurmctld of a step's end before srun, for which the script waits.
    launcher = "mpirun" if int(version.partition(".")[0]) >= 26 else None
    with faulty(slurm_lab, launcher=launcher, **ELSEWHERE) as run:
        job = run.ask("cluster.job_id")
        with fault(slurm_lab, *AWAY):
            run.do("cluster.close()")
            log = run.ask("cluster.get_logs()['Cluster']")
            assert f"job {job}: its script has ended with exit code 0; the batch system does not answer" in log
            assert run.ask("str(cluster.jobs)").count("GONE (closed)") == 1
        slurm_lab.wait_job(job, {"COMPLETED"})
