"""A little batch world in which anything may happen, and a loop that does what reconcile says."""

from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hpcgpu.model import JobState, JobStatus
from hpcgpu.plan.jobs.job import Job
from hpcgpu.plan.jobs.job_end import Failures
from hpcgpu.plan.jobs.reconcile import Actions, Facts, Policy, reconcile

FULL = 2
CALM_S = 3000.0
WORDS = {
    JobState.PENDING: "PENDING",
    JobState.HELD: "PENDING",
    JobState.STUCK: "PENDING",
    JobState.RUNNING: "RUNNING",
    JobState.SUSPENDED: "SUSPENDED",
    JobState.ENDED: "FAILED",
}


@dataclass(slots=True, eq=False)
class WorldJob:
    """A job as it is, which nobody knows."""

    id: str
    state: JobState = JobState.PENDING
    workers: int = 0
    restarts: int = 0
    started_s: float = 0.0
    dud: bool = False  # no worker ever comes
    strange: bool = False  # its state is a word that nobody knows
    listed: bool = True
    stubborn: bool = False  # outlives a cancel
    draining: bool = False
    silent: bool = False  # its workers are registered, and say nothing

    @property
    def there(self) -> bool:
        return self.state is not JobState.ENDED


class World(RuleBasedStateMachine):
    """Jobs, the batch system, and the loop with its table."""

    @initialize(walltime_s=st.sampled_from([None, 400.0, 3600.0]))
    def begin(self, walltime_s: float | None) -> None:
        self.policy = Policy(walltime_s=walltime_s)
        self.now_s = 0.0
        self.answers = True
        self.ids = count()
        self.jobs: dict[str, WorldJob] = {}
        # the loop's
        self.table: dict[str, Job] = {}
        self.wanted, self.adapting = 0, False
        self.submissions: list[int] = []
        self.asked_s: float | None = None
        self.answered_s: float | None = None
        self.held_back_until_s = 0.0
        self.failures = Failures()
        self.actions = Actions()
        self.streak = 0  # what the breaker should have counted

    # what the loop does

    def facts(self) -> Facts:
        same = ("now_s", "adapting", "asked_s", "answered_s", "held_back_until_s", "failures")
        facts = {name: getattr(self, name) for name in same}
        return Facts(target=self.wanted, jobs=tuple(self.table.values()), **facts)

    def react(self) -> None:
        """Do what reconcile says, until there is nothing to do."""
        for _ in range(20):
            if self.submissions:  # the fleet's lock: its end wakes the loop
                self.actions = Actions()
                return
            self.now_s += 0.001
            actions = self.actions = reconcile(self.facts(), self.policy)
            self.check(actions)
            self.failures = actions.failures
            if actions.submit:
                self.submissions.append(actions.submit)
                self.check_submission()
            for name in actions.retire:
                self.table[name] = replace(self.table[name], retired_s=self.now_s)
                self.jobs[name].draining = True
            for name in actions.cancel if self.answers else ():
                self.table[name] = replace(self.table[name], cancelled_s=self.now_s)
                self.cancel(self.jobs[name])
            for name in actions.lost:
                job = self.jobs[name]
                job.workers, job.silent = 0, False
                self.table[name] = self.table[name].registered(0, self.now_s)
            failed = set() if self.answers else set(actions.cancel)
            for name, _ in actions.forget:
                if name not in failed:
                    del self.table[name]
            acted = actions.submit or actions.retire or actions.forget or actions.cancel or actions.lost
            if not acted or failed:
                return
        raise AssertionError(f"reconcile finds no rest: {actions}")

    def ask(self) -> None:
        self.asked_s = self.now_s
        if not self.answers:
            return
        self.answered_s = self.now_s
        for name, known in self.table.items():
            job = self.jobs[name]
            status = JobStatus(JobState.UNKNOWN, "NEW_WORD") if job.strange else JobStatus(job.state, WORDS[job.state])
            self.table[name] = known.listed(status if job.listed else None, self.now_s)

    def tell(self, job: WorldJob) -> None:
        """The scheduler says how many workers of the job it has."""
        if job.id in self.table:
            known = self.table[job.id].first_worker_s
            self.table[job.id] = self.table[job.id].registered(job.workers, self.now_s, job.restarts, silent=job.silent)
            if known is None and job.workers:
                self.streak = 0
        self.react()

    # what must hold at each step

    def check(self, actions: Actions) -> None:
        known = self.table
        count_of = [*actions.cancel, *actions.retire]
        assert len(set(count_of)) == len(count_of)
        self.count_failures(actions)
        assert bool(actions.give_up) == (self.streak >= self.policy.breaker)
        assert not (actions.submit and (actions.give_up or self.now_s < self.held_back_until_s))
        for name in actions.cancel:
            age_s = self.now_s - known[name].submitted_s
            waits = known[name].state is not JobState.STUCK  # who is stuck has no place in the queue to lose
            assert known[name].leaving or not self.adapting or age_s >= self.policy.hold_s or not waits
            assert not known[name].heard or known[name].leaving, "who has workers hands over"
        stay = [j for j in known.values() if self.counts(j) and j.workers and j.state is not JobState.ENDED]
        left = [j for j in stay if j.id not in actions.retire]
        assert len(left) >= min(self.wanted, len(stay))
        if actions.next_s is None:
            rest = [j for j in known.values() if j.id not in dict(actions.forget)]
            assert all(j.heard and not j.leaving and j.state is not JobState.SUSPENDED for j in rest)

    def count_failures(self, actions: Actions) -> None:
        for name in {*dict(actions.forget), *actions.cancel}:
            job = self.table[name]
            alone_s = self.answered_s - job.alone_since_s if self.answered_s and job.alone_since_s is not None else 0
            ghost = job.state is JobState.RUNNING and alone_s >= self.policy.start_limit_s
            ghost |= job.state is JobState.STUCK
            gone = name in dict(actions.forget)
            self.streak += job.first_worker_s is None and not job.leaving and (gone or ghost)

    def counts(self, job: Job) -> bool:
        return not job.leaving and not self.is_outgoing(job.started_s)

    def is_outgoing(self, started_s: float | None) -> bool:
        if self.policy.walltime_s is None or started_s is None:
            return False
        return self.now_s >= started_s + self.policy.walltime_s - 2 * self.policy.lead_s(Job(id="any"))

    def check_submission(self) -> None:
        """No second submission for one hole: what is really there and does not leave is never too much."""
        there = [j for j in self.jobs.values() if j.there and j.id in self.table]
        staying = [j for j in there if self.counts(self.table[j.id])]
        gone = set(self.actions.cancel) | set(dict(self.actions.forget))
        assert len([j for j in staying if j.id not in gone]) + sum(self.submissions) <= self.wanted

    # what the world does

    def some(self, number: int, *states: JobState, **more: Any) -> WorldJob | None:
        found = [
            j for j in self.jobs.values() if j.state in states and all(getattr(j, k) == v for k, v in more.items())
        ]
        return found[number % len(found)] if found else None

    def end(self, job: WorldJob, *, noticed: bool = True) -> None:
        job.state = JobState.ENDED
        if noticed:
            job.workers = 0
            self.tell(job)

    def cancel(self, job: WorldJob) -> None:
        if job.stubborn and job.listed:
            job.stubborn = False
        elif job.there:
            job.state, job.workers = JobState.ENDED, 0
            if job.id in self.table:
                self.table[job.id] = self.table[job.id].registered(0, self.now_s)

    def submission_returns(self) -> None:
        for _ in range(self.submissions.pop(0)):
            name = str(next(self.ids))
            self.jobs[name] = WorldJob(name)
            self.table[name] = Job(id=name, submitted_s=self.now_s, expected=FULL)
        self.react()

    def wait(self, seconds: float) -> None:
        """Let time pass as the loop does: ask when it is time to, wake up when it is time to."""
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            asked_at_s = self.now_s + self.actions.next_s if self.actions.next_s is not None else until_s
            woken_at_s = self.now_s + self.actions.wake_s if self.actions.wake_s is not None else until_s
            self.now_s = max(self.now_s, min(asked_at_s, woken_at_s, until_s))
            for job in list(self.jobs.values()):
                ran_s = self.now_s - job.started_s
                over = self.policy.walltime_s is not None and ran_s >= self.policy.walltime_s
                if (job.draining and job.there) or (over and job.state is JobState.RUNNING):
                    self.end(job)
            if asked_at_s <= self.now_s:
                self.ask()
            self.react()

    @rule(wanted=st.integers(0, 6), adapting=st.booleans(), again=st.booleans())
    def scale(self, wanted: int, adapting: bool, again: bool) -> None:
        self.wanted, self.adapting = wanted, adapting
        if again:
            self.failures, self.streak = Failures(), 0
        self.react()

    @precondition(lambda self: self.submissions)
    @rule()
    def a_submission_comes_back(self) -> None:
        self.submission_returns()

    @precondition(lambda self: self.submissions)
    @rule()
    def a_submission_is_refused_for_now(self) -> None:
        self.submissions.pop(0)
        self.held_back_until_s = self.now_s + 10
        self.react()

    @rule(seconds=st.sampled_from([0.1, 1.0, 7.0, 61.0, 400.0]))
    def time_passes(self, seconds: float) -> None:
        self.wait(seconds)

    @rule(number=st.integers(0, 9), dud=st.booleans())
    def a_job_starts(self, number: int, dud: bool) -> None:
        if job := self.some(number, JobState.PENDING):
            job.state, job.started_s, job.dud = JobState.RUNNING, self.now_s, dud

    @rule(number=st.integers(0, 9))
    def a_worker_comes(self, number: int) -> None:
        job = self.some(number, JobState.RUNNING, dud=False, draining=False, silent=False)
        if job and job.workers < FULL:
            job.workers += 1
            self.tell(job)

    @rule(number=st.integers(0, 9), lost=st.integers(1, FULL))
    def workers_die(self, number: int, lost: int) -> None:
        if (job := self.some(number, JobState.RUNNING)) and job.workers:
            job.workers = max(0, job.workers - lost)
            self.tell(job)

    @rule(number=st.integers(0, 9), noticed=st.booleans())
    def a_job_ends(self, number: int, noticed: bool) -> None:
        if job := self.some(number, JobState.PENDING, JobState.RUNNING, JobState.HELD, JobState.STUCK):
            self.end(job, noticed=noticed)

    @rule(number=st.integers(0, 9))
    def a_job_is_requeued(self, number: int) -> None:
        if job := self.some(number, JobState.RUNNING, draining=False):
            job.state, job.restarts, job.dud = JobState.PENDING, job.restarts + 1, False
            if not job.silent:
                job.workers = 0
                self.tell(job)

    @rule(number=st.integers(0, 9), silent=st.booleans())
    def a_node_is_frozen_or_thaws(self, number: int, silent: bool) -> None:
        job = self.some(number, JobState.RUNNING, draining=False)
        if job and job.workers:
            job.silent = silent
            self.tell(job)

    @rule(number=st.integers(0, 9), listed=st.booleans())
    def a_job_is_not_listed_or_is_again(self, number: int, listed: bool) -> None:
        if job := self.some(number, *JobState):
            job.listed = listed

    @rule(number=st.integers(0, 9), strange=st.booleans())
    def a_job_has_a_state_that_nobody_knows(self, number: int, strange: bool) -> None:
        if job := self.some(number, *JobState):
            job.strange = strange

    @rule(number=st.integers(0, 9), noticed=st.booleans())
    def a_job_is_suspended(self, number: int, noticed: bool) -> None:
        if job := self.some(number, JobState.RUNNING, draining=False):
            job.state = JobState.SUSPENDED
            if noticed:
                job.workers = 0
                self.tell(job)

    @rule(number=st.integers(0, 9))
    def a_job_is_resumed(self, number: int) -> None:
        if job := self.some(number, JobState.SUSPENDED):
            job.state = JobState.RUNNING

    @rule(number=st.integers(0, 9), state=st.sampled_from([JobState.PENDING, JobState.HELD, JobState.STUCK]))
    def a_job_is_held_or_stuck_or_released(self, number: int, state: JobState) -> None:
        if job := self.some(number, JobState.PENDING, JobState.HELD):
            job.state = state

    @rule(number=st.integers(0, 9))
    def a_job_will_outlive_a_cancel(self, number: int) -> None:
        if job := self.some(number, *WORDS):
            job.stubborn = True

    @rule(answers=st.booleans())
    def the_batch_system_stops_answering_or_is_back(self, answers: bool) -> None:
        self.answers = answers

    @invariant()
    def no_job_is_forgotten_that_is_there(self) -> None:
        if hasattr(self, "jobs"):
            lost = [j for j in self.jobs.values() if j.there and j.id not in self.table]
            assert not lost, "an orphan"

    # when the world calms down

    def calm(self) -> None:
        self.answers = True
        for job in list(self.jobs.values()):
            job.strange = False
            if job.silent and job.state is JobState.RUNNING:
                job.silent = False
                self.tell(job)
            if job.state is JobState.HELD:
                job.state = JobState.PENDING
            elif job.state is JobState.SUSPENDED:
                job.state = JobState.RUNNING
            elif job.state is JobState.ENDED:
                self.end(job)

    def go_on(self) -> None:
        """All that is asked for happens at once."""
        while self.submissions:
            self.submission_returns()
        for job in list(self.jobs.values()):
            if job.state is JobState.PENDING and not job.silent:
                job.state, job.started_s = JobState.RUNNING, self.now_s
            if job.state is JobState.RUNNING and not job.draining and not job.dud and job.workers < FULL:
                job.workers = FULL
                self.tell(job)

    def is_changing(self) -> bool:
        return bool(self.submissions) or any(j.workers < FULL or j.leaving for j in self.table.values())

    def teardown(self) -> None:
        if not hasattr(self, "jobs"):
            return
        self.calm()
        until_s = self.now_s + CALM_S
        # with a walltime jobs follow each other for ever: look between two of them
        while self.now_s < until_s or (self.is_changing() and self.now_s < until_s + 60):
            self.go_on()
            self.wait(5.0)
        there = [j for j in self.jobs.values() if j.there]
        assert {j.id for j in there} == set(self.table), "a ghost or an orphan"
        if self.actions.give_up:
            assert self.failures.last in self.actions.give_up
            assert len(there) <= self.wanted
        else:
            assert len(there) == self.wanted
        assert all(j.workers == FULL for j in there), "a ghost"


TestWorld = World.TestCase
TestWorld.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
