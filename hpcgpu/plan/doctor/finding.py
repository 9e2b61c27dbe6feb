"""The doctor's findings: one line for each check, as text and as plain data."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from hpcgpu.plan.doctor.facts import NodeFacts, TrialFacts


class Verdict(enum.Enum):
    """The result of a check in one word."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    NOT_LOOKED_AT = "not looked at"


class CheckResult(NamedTuple):
    """The result of a check: one line of the doctor's report."""

    verdict: Verdict
    seen: str  # the observation; or why there is none
    advice: str = ""  # what to do; "": nothing
    name: str = ""  # of the check; :func:`examine` adds it


class Check(NamedTuple):
    """A check: a fact, and the function that judges it."""

    name: str
    fact: str  # a field of the facts, perhaps None; "": all of them
    look: Callable[[Any], CheckResult]  # called with the fact


def examine(checks: Iterable[Check], facts: Any) -> tuple[CheckResult, ...]:
    """Run the checks; a check is not looked at if its fact is None, for the reason in ``facts.unknown``."""
    out = []
    for name, fact, look in checks:
        value = getattr(facts, fact) if fact else facts
        missing = not_looked_at(facts.unknown.get(fact, "it is not known here"))
        out.append((missing if value is None else look(value))._replace(name=name))
    return tuple(out)


def ok(seen: str) -> CheckResult:
    """Return an OK result."""
    return CheckResult(Verdict.OK, seen)


def warning(seen: str, advice: str) -> CheckResult:
    """Return a result with which a cluster may be slow, or fail later."""
    return CheckResult(Verdict.WARNING, seen, advice)


def failed(seen: str, advice: str) -> CheckResult:
    """Return a result with which a cluster cannot work."""
    return CheckResult(Verdict.FAILED, seen, advice)


def not_looked_at(why: str) -> CheckResult:
    """Return a result without an observation, and the reason."""
    return CheckResult(Verdict.NOT_LOOKED_AT, why)


def worst(results: Iterable[CheckResult]) -> CheckResult:
    """Return the first of the worst of several results."""
    order = (Verdict.FAILED, Verdict.WARNING, Verdict.OK, Verdict.NOT_LOOKED_AT)
    return min(results, key=lambda seen: order.index(seen.verdict))


def on(node: NodeFacts, seen: CheckResult) -> CheckResult:
    """Return a result with the node's name."""
    return seen._replace(seen=f"{node.host}: {seen.seen}")


def each(facts: TrialFacts, fact: str, look: Callable[[NodeFacts, Any], CheckResult]) -> CheckResult:
    """Return the worst result of the nodes, each judged by this fact of it."""
    values = [(node, getattr(node, fact)) for node in facts.nodes]
    return worst(
        on(node, not_looked_at(node.unknown.get(fact, "it is not known")) if value is None else look(node, value))
        for node, value in values
    )


def exit_code(findings: Iterable[CheckResult]) -> int:
    """Return 1 if a check failed, else 0."""
    return int(any(finding.verdict is Verdict.FAILED for finding in findings))
