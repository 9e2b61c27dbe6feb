"""What is done so that as many jobs are there as are wanted: situations one by one."""

from dataclasses import replace
from typing import Any

import pytest

from hpcgpu.model import JobState, JobStatus
from hpcgpu.plan.jobs.job import Job
from hpcgpu.plan.jobs.job_end import Failures, may_answer, why_missing, why_over
from hpcgpu.plan.jobs.reconcile import Actions, Facts, Policy, reconcile

PENDING = JobStatus(JobState.PENDING, "PENDING", "Priority")
HELD = JobStatus(JobState.HELD, "PENDING", "JobHeldUser")
STUCK = JobStatus(JobState.STUCK, "PENDING", "launch failed requeued held")
RUNNING = JobStatus(JobState.RUNNING, "RUNNING")
SUSPENDED = JobStatus(JobState.SUSPENDED, "SUSPENDED")
DOWN = JobStatus(JobState.RUNNING, "R", trouble="node2 is down")
COMPLETING = JobStatus(JobState.RUNNING, "COMPLETING", trouble="in state COMPLETING")
STRANGE = JobStatus(JobState.UNKNOWN, "POWERING_DOWN")
FAILED = JobStatus(JobState.ENDED, "FAILED", "NonZeroExitCode", 1)
DONE = JobStatus(JobState.ENDED, "COMPLETED", "", 0)
TIMEOUT = JobStatus(JobState.ENDED, "TIMEOUT", "", None)

NOW_S = 0.0  # times before it are negative
HOUR = Policy(walltime_s=3600.0, drain_s=120.0)
REPLACED, CANCELLED, RETIRED = {"submit": 1, "cancel": ("1",)}, {"cancel": ("1",)}, {"retire": ("1",)}
TWO = Failures(2, -50, "job 0: FAILED")


def job(name: str, status: JobStatus | None = PENDING, age_s: float = 1000.0, **more: Any) -> Job:
    """A job that was submitted ``age_s`` ago, and asked for since."""
    plain = Job(id=name, submitted_s=-age_s, expected=4, **more)
    return plain if status is None else plain.listed(status, -age_s)


def up(name: str, age_s: float = 1000.0, **more: Any) -> Job:
    return job(name, RUNNING, age_s, **more).registered(4, -age_s)


def ending(code: int, since_s: float) -> Job:
    """A job whose output is not delivered."""
    return up("1").registered(0, -50).listed(replace(COMPLETING, is_ending=True), -50).script_ended(True, code, since_s)


def facts(wanted: int, *jobs: Job, **more: Any) -> Facts:
    return Facts(**{"now_s": NOW_S, "target": wanted, "jobs": jobs, "asked_s": NOW_S, "answered_s": NOW_S, **more})


def done(known: Facts, policy: Policy = Policy()) -> dict[str, Any]:  # noqa: B008 - frozen
    """Return what reconcile wants done, without what it wants nothing of."""
    actions = reconcile(known, policy)
    names = ("submit", "cancel", "retire", "forget", "lost", "give_up")
    return {n: v for n in names if (v := getattr(actions, n)) != getattr(Actions(), n)}


SITUATIONS: dict[str, tuple[Facts, dict[str, Any]]] = {
    "nothing is wanted and nothing is there": (facts(0), {}),
    "all that is missing is submitted at once": (facts(1000), {"submit": 1000}),
    "a refused submission waits": (facts(5, held_back_until_s=1), {}),
    "a refused submission is tried again": (facts(5, held_back_until_s=NOW_S), {"submit": 5}),
    "one that nobody has asked for counts": (facts(1, job("1", None)), {}),
    "pending, held, starting, up: all count": (facts(4, job("1"), job("2", HELD), job("3", RUNNING, 10), up("4")), {}),
    "one that could not be started and is not tried again is replaced": (facts(1, job("1", STUCK)), REPLACED),
    "a suspended one counts, however long it has no worker": (facts(1, job("1", SUSPENDED, 9000)), {}),
    "a word that nobody knows counts": (facts(1, job("1", STRANGE, 9000)), {}),
    "an end is told": (facts(1, up("1").listed(TIMEOUT, NOW_S)), {"submit": 1, "forget": (("1", "TIMEOUT"),)}),
    "one that has ended has ended, whoever is still registered": (
        facts(1, up("1").listed(FAILED, NOW_S)),
        {"submit": 1, "forget": (("1", "exit code 1, FAILED, NonZeroExitCode"),)},
    ),
    "one whose workers are silent is waited for": (facts(1, up("1").registered(4, -9000, silent=True)), {}),
    "one that is to start again is rid of the silent workers of its last life": (
        facts(1, up("1").registered(4, -9, silent=True).listed(PENDING, NOW_S)),
        {"lost": ("1",)},
    ),
    "one that is to start again keeps the workers that are heard": (facts(1, up("1").listed(PENDING, NOW_S)), {}),
    "one that is not listed is waited for": (facts(1, job("1").listed(None, -59)), {}),
    "a new one may be missing in answers of a cache": (facts(1, job("1", None).listed(None, -299)), {}),
    "one that no answer has ever listed is gone after minutes": (
        facts(1, job("1", None).listed(None, -300)),
        {"submit": 1, "cancel": ("1",), "forget": (("1", "the batch system has not listed it for 300 s"),)},
    ),
    "one that is not listed for long is gone": (
        facts(1, job("1").listed(None, -60)),
        {"submit": 1, "cancel": ("1",), "forget": (("1", "the batch system has not listed it for 60 s"),)},
    ),
    "one may be there where nobody has answered since": (facts(1, job("1").listed(None, -600), answered_s=-600), {}),
    "one with workers is alive, listed or not": (facts(1, up("1").listed(None, -600)), {}),
    "a ghost is cancelled and replaced": (facts(1, job("1", RUNNING, 300)), REPLACED),
    "one that starts is no ghost": (facts(1, job("1", RUNNING, 299)), {}),
    "one that runs by an old answer alone is no ghost": (facts(1, job("1", RUNNING, 300), answered_s=-100), {}),
    "one that lost its workers becomes a ghost": (facts(1, up("1").registered(0, -300)), REPLACED),
    "one on a lost node is soon a ghost": (facts(1, up("1").registered(0, -60).listed(DOWN, -1)), REPLACED),
    "so is one that is silent": (facts(1, up("1").registered(4, -60, silent=True).listed(DOWN, -1)), REPLACED),
    "one on a node that was lost a moment ago may be back": (facts(1, up("1").registered(0, -59).listed(DOWN, -1)), {}),
    "one whose workers are heard is not lost with its node's batch system": (facts(1, up("1").listed(DOWN, -900)), {}),
    "one whose end takes long is soon a ghost": (facts(1, up("1").registered(0, -60).listed(COMPLETING, -1)), REPLACED),
    "one whose script has ended by itself is soon a ghost": (facts(1, ending(3, -10)), REPLACED),
    "its end may be near": (facts(1, ending(3, -9)), {}),
    "one whose script was ended by a signal may start again": (facts(1, ending(143, -59)), {}),
    "one that is ending may start again": (facts(1, up("1").registered(0, -59).listed(COMPLETING, -1)), {}),
    "one whose workers restart is no ghost": (facts(1, up("1").registered(0, -5)), {}),
    "one that was suspended has time to get its workers back": (
        facts(1, up("1").listed(SUSPENDED, -900).registered(0, -800).listed(RUNNING, -10)),
        {},
    ),
    "a requeued one waits again, and counts": (facts(1, up("1").listed(PENDING, -900).registered(0, -899)), {}),
    "the youngest go": (facts(1, job("1", age_s=30), job("2", age_s=20), job("3", age_s=10)), {"cancel": ("3", "2")}),
    "of one array the last go": (facts(1, job("7_0"), job("7_1"), job("7_2")), {"cancel": ("7_2", "7_1")}),
    "a pending one goes before one that starts, that before one with workers": (
        facts(1, up("1"), job("2", RUNNING, 5), job("3", age_s=900), up("4")),
        {"cancel": ("3", "2"), "retire": ("4",)},
    ),
    "of those with workers the youngest goes": (facts(1, up("1", 9), up("2", 5), up("3", 7)), {"retire": ("2", "3")}),
    "nothing at all is wanted": (facts(0, up("1"), job("2")), {"cancel": ("2",), "retire": ("1",)}),
    "adapt keeps a young pending one": (facts(0, job("1", age_s=59), adapting=True), {}),
    "adapt cancels an old pending one": (facts(0, job("1", age_s=60), adapting=True), CANCELLED),
    "adapt takes no older one for a young one": (facts(1, job("1", age_s=900), job("2", age_s=5), adapting=True), {}),
    "adapt does not retire in place of a young one": (facts(1, up("1"), job("2", age_s=5), adapting=True), {}),
    "adapt retires all while young ones wait": (facts(0, up("1"), job("2", age_s=5), adapting=True), RETIRED),
    "leaving does not count": (facts(2, up("1", retired_s=NOW_S), job("2", cancelled_s=NOW_S), up("3")), {"submit": 1}),
    "who leaves is not told twice": (facts(0, up("1", retired_s=-9), job("2", cancelled_s=-9)), {}),
    "who was cancelled and is still there is cancelled again": (facts(0, job("1", cancelled_s=-60)), CANCELLED),
    "who was retired has time to hand over its data": (facts(0, up("1", retired_s=-179)), {}),
    "who was retired and does not go is cancelled": (facts(0, up("1", retired_s=-180)), CANCELLED),
    "a retired one without workers is cancelled": (facts(0, up("1", retired_s=-90).registered(0, -60)), CANCELLED),
}


@pytest.mark.parametrize(("known", "expected"), SITUATIONS.values(), ids=SITUATIONS)
def test_in_this_situation(known: Facts, expected: dict[str, Any]) -> None:
    assert done(known) == expected


def shorter() -> Job:
    """A job of 12 min in place of an hour: a hook of the site, or its queue, has set them."""
    return up("1", 600).listed(replace(RUNNING, limit_s=720), -600)


HAND_OVERS: dict[str, tuple[Facts, dict[str, Any]]] = {
    "long before its end a job counts": (facts(1, up("1", 3359)), {}),
    "twice the drain before its end it gets a successor, and works on": (facts(1, up("1", 3360)), {"submit": 1}),
    "while the successor waits it works on": (facts(1, up("1", 3479), job("2")), {}),
    "while the successor starts it works on": (facts(1, up("1", 3479), up("2", 9).registered(3, NOW_S)), {}),
    "when the successor is up it leaves": (facts(1, up("1", 3370), up("2", 5)), RETIRED),
    "at the drain before its end it leaves, successor or not": (facts(1, up("1", 3480), job("2")), RETIRED),
    "the walltime of the batch system's answer counts": (facts(2, up("1", 600), up("2", 5)), {}),
    "it is shorter than the one that was asked for": (facts(1, shorter(), up("2", 5)), RETIRED),
    "when nothing is wanted any more it leaves at once": (facts(0, up("1", 3360)), RETIRED),
    "when its workers have left it is about to end": (facts(1, up("1", 3480).registered(0, -1), up("2", 5)), RETIRED),
    "without a worker ever it is cancelled": (facts(1, job("1", RUNNING, age_s=3480), up("2", 5)), CANCELLED),
    "of three for two the one near its end leaves": (facts(2, up("1", 3360), up("2", 2000), up("3")), RETIRED),
    "of too many the one with the least time left leaves": (facts(1, up("1", 10), up("2", 3000)), {"retire": ("2",)}),
    "a suspended one cannot hand over": (facts(1, up("1", 3590).listed(SUSPENDED, NOW_S)), {}),
    "a requeued one has all its time": (
        facts(1, up("1", 3590).listed(PENDING, -60).registered(0, -60).registered(4, -9, 1)),
        {},
    ),
    "workers' names alone tell of a requeue": (facts(1, up("1", 3590).registered(0, -60).registered(4, -9, 1)), {}),
}


@pytest.mark.parametrize(("known", "expected"), HAND_OVERS.values(), ids=HAND_OVERS)
def test_of_a_walltime_of_an_hour(known: Facts, expected: dict[str, Any]) -> None:
    assert done(known, HOUR) == expected


def test_a_drain_is_never_more_than_a_quarter_of_the_walltime() -> None:
    short = Policy(walltime_s=100.0, drain_s=120.0)
    assert done(facts(1, up("1", 49)), short) == {}
    assert done(facts(1, up("1", 50)), short) == {"submit": 1}
    assert done(facts(1, up("1", 75), job("2")), short) == RETIRED


def test_three_jobs_without_a_worker_stop_the_submissions() -> None:
    failures, given = Failures(), []
    for name in ("1", "2", "3"):
        actions = reconcile(facts(1, job(name, FAILED), failures=failures), Policy())
        failures = actions.failures
        given.append((actions.submit, failures.in_a_row))
    assert given == [(1, 1), (1, 2), (0, 3)]
    assert actions.give_up == (
        "3 jobs in a row ended before their first worker; the last was job 3: exit code 1, FAILED, NonZeroExitCode"
    )
    assert reconcile(facts(1, failures=failures), Policy()).give_up == actions.give_up, "it is said as long as it is so"
    assert done(facts(1)) == {"submit": 1}, "with fresh failures all is tried again"


COUNTS: dict[str, tuple[Job, int]] = {
    "one that ends before its first worker": (job("1", FAILED), 3),
    "one that ends well before its first worker": (job("1", DONE), 3),
    "one that vanishes before its first worker": (job("1").listed(None, -60), 3),
    "one that runs and never gets a worker": (job("1", RUNNING, 300), 3),
    "not one that had a worker once": (up("1").registered(0, -300).listed(FAILED, NOW_S), 2),
    "not one that we cancelled": (job("1", FAILED, cancelled_s=-9), 2),
    "not one that we retired": (job("1", FAILED, retired_s=-9), 2),
    "a first worker since then ends the row": (up("1", 40), 0),
    "a first worker before does not": (up("1", 60), 2),
    "a later worker does not": (up("1", 60).registered(0, -30).registered(4, -20), 2),
}


@pytest.mark.parametrize(("known", "count"), COUNTS.values(), ids=COUNTS)
def test_failures_in_a_row(known: Job, count: int) -> None:
    assert reconcile(facts(1, known, failures=TWO), Policy()).failures.in_a_row == count


ASKING: dict[str, tuple[Facts, float | None]] = {
    "never, when nothing is there": (facts(0), None),
    "never, when all is up": (facts(2, up("1"), up("2")), None),
    "never, when all is up and one is not listed": (facts(1, up("1").listed(None, NOW_S)), None),
    "never of an end": (facts(0, job("1", DONE)), None),
    "at once, when it was never done": (facts(1, job("1", None), asked_s=None), 0.0),
    "at once, after a long silence": (facts(1, job("1", None, 1), asked_s=-100), 0.0),
    "soon, of something new": (facts(1, job("1", None, 1), asked_s=-2), 3.0),
    "soon, of one that is being cancelled": (facts(0, job("1")), 5.0),
    "soon, of one that is being retired": (facts(0, up("1")), 5.0),
    "later, of something older": (facts(1, job("1", age_s=60)), 10.0),
    "seldom, of something old": (facts(1, job("1", age_s=9999)), 60.0),
    "by the youngest of them": (facts(2, job("1", age_s=9999), job("2", age_s=90)), 15.0),
    "of a suspended one with its workers": (facts(1, up("1").listed(SUSPENDED, NOW_S)), 60.0),
    "of one that starts": (facts(1, job("1", RUNNING, 120)), 20.0),
    "at once, of one that lost its workers": (facts(1, up("1").registered(0, NOW_S), asked_s=-4), 0.0),
    "at once, of one whose workers fall silent": (facts(1, up("1").registered(4, NOW_S, silent=True), asked_s=-4), 0.0),
    "soon, of one whose workers came sooner than an answer": (facts(1, job("1").registered(4, NOW_S)), 5.0),
    "soon, of one that was never asked about": (facts(1, job("1", None).registered(4, -3)), 5.0),
    "never again, when that one is known to run": (facts(1, job("1").registered(4, -9).listed(RUNNING, -4)), None),
    "never again, whatever the answer was": (facts(1, job("1").registered(4, -9).listed(None, NOW_S)), None),
    "later, of one that stays silent": (facts(1, up("1").registered(4, -120, silent=True)), 20.0),
    "never, of one that is heard again": (facts(1, up("1").registered(4, -9, silent=True).registered(4, NOW_S)), None),
    "a little later, when many lose theirs": (facts(1, up("1").registered(0, NOW_S), asked_s=-0.25), 0.75),
    "then soon, even if it did not answer": (facts(1, up("1").registered(0, -1), answered_s=-99), 5.0),
    "then soon": (facts(1, up("1").registered(0, -1), asked_s=NOW_S), 5.0),
    "of a head: a moment after its submission": (facts(0, job("7", None, 0, role="head"), asked_s=None), 1.0),
    "of a head: never, when it is up": (facts(0, up("7", role="head")), None),
    "of a head: once more, if workers came first": (facts(0, job("7", role="head", age_s=1).registered(4, NOW_S)), 5.0),
    "of a head: soon, at its script's end": (
        facts(0, up("7", role="head").registered(0, -100).script_ended(True, 0, NOW_S), asked_s=-0.5),
        0.5,
    ),
    "of a head: never again, when it is over": (facts(0, job("7", FAILED, role="head")), None),
    "of a head: with all others": (facts(1, up("7", role="head"), job("8")), 60.0),
}


@pytest.mark.parametrize(("known", "next_s"), ASKING.values(), ids=ASKING)
def test_the_batch_system_is_asked(known: Facts, next_s: float | None) -> None:
    assert reconcile(known, Policy()).next_s == next_s


WAKES: dict[str, tuple[Facts, float | None]] = {
    "not when all is well": (facts(1, job("1")), None),
    "for the successor": (facts(2, up("1", 3000), up("2")), 360.0),
    "for the end": (facts(1, up("1", 3400), job("2")), 80.0),
    "not for one that leaves": (facts(0, up("1", 3400)), None),
    "when a young job may be cancelled": (facts(0, job("1", age_s=45), adapting=True), 15.0),
    "when a submission may be tried again": (facts(1, held_back_until_s=4), 4.0),
    "not when none is needed": (facts(1, job("1"), held_back_until_s=4), None),
}


@pytest.mark.parametrize(("known", "wake_s"), WAKES.values(), ids=WAKES)
def test_it_wakes_up(known: Facts, wake_s: float | None) -> None:
    assert reconcile(known, HOUR).wake_s == wake_s


# --- the job with the scheduler

OVERS: dict[str, tuple[Job, str]] = {
    "not when it waits": (job("7", role="head"), ""),
    "not when it is not listed": (up("7", role="head").registered(0, NOW_S).listed(None, -500), ""),
    "not when it has no workers": (up("7", role="head").registered(0, -999), ""),
    "not when nobody answers": (job("7", STRANGE, role="head"), ""),
    "when it has ended": (job("7", FAILED, role="head"), "job 7 has ended: FAILED (NonZeroExitCode), exit code 1"),
    "not when it will not start again, but its workers are there": (up("7", role="head").listed(STUCK, NOW_S), ""),
    "when its script has, long ago": (
        job("7", COMPLETING, role="head").script_ended(True, 3, -60),
        "job 7 has ended: its script has ended with exit code 3 60 s ago, though the batch system still has it in "
        "state COMPLETING",
    ),
    "and sooner if only its output is not delivered": (
        job("7", replace(COMPLETING, is_ending=True), role="head").script_ended(True, 3, -10),
        "job 7 has ended: its script has ended with exit code 3 10 s ago, though the batch system still has it in "
        "state COMPLETING",
    ),
    "not when its script has, a moment ago": (job("7", COMPLETING, role="head").script_ended(True, 3, -59), ""),
    "not when it lives again": (
        job("7", RUNNING, role="head").script_ended(True, 3, -99).script_ended(False, None, -1),
        "",
    ),
}


@pytest.mark.parametrize(("known", "why"), OVERS.values(), ids=OVERS)
def test_the_job_with_the_scheduler_is_over(known: Job, why: str) -> None:
    assert why_over(known, NOW_S, Policy().late_limit_s) == why
    assert not why or reconcile(facts(0, known), Policy()).next_s is None


def test_head_job_that_will_not_start_has_advice() -> None:
    why = why_over(job("7", STUCK, role="head", hosts=("node2",)), NOW_S, 60.0)
    assert why.startswith("job 7 will not start: PENDING (launch failed requeued held). Its nodes (at last node2)")
    never = replace(STUCK, advice="fewer nodes=")
    assert "Request resources that exist (fewer nodes=)" in why_over(job("7", never, role="head"), NOW_S, 60.0)


UNLISTED = up("7", role="head").registered(0, -100).listed(None, -40)


@pytest.mark.parametrize(
    ("known", "since_s", "why"),
    [
        (UNLISTED, -90, "the batch system has not listed job 7 for 30 s"),
        (UNLISTED, -20, ""),  # what was answered before the search counts for nothing
        (UNLISTED.listed(None, -1), -90, "the batch system has not listed job 7 for 30 s"),
        (UNLISTED.listed(RUNNING, -2).listed(None, -1), -90, ""),
        (UNLISTED.listed(STRANGE, NOW_S), -90, ""),
    ],
)
def test_why_missing_after_a_long_silence(known: Job, since_s: float, why: str) -> None:
    assert why_missing(known, since_s, NOW_S) == why
    assert may_answer(known) == (known.status is STRANGE)


@pytest.mark.parametrize("head", [known for known, _ in OVERS.values()], ids=OVERS)
def test_head_job_is_never_replaced(head: Job) -> None:
    for situation, (known, _) in SITUATIONS.items():
        assert done(replace(known, jobs=(head, *known.jobs)), HOUR) == done(known, HOUR), situation
