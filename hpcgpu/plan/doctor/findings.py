"""The findings of a check: verdict, text and advice."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

from hpcgpu.plan.doctor.facts import NodeFacts, TrialFacts


class Verdict(enum.Enum):
    """The result of a check in one word, the worst first."""

    FAILED = "failed"
    WARNING = "warning"
    OK = "ok"
    NOT_LOOKED_AT = "not looked at"


class CheckResult(NamedTuple):
    """The result of a check: one line of the doctor's report."""

    verdict: Verdict
    seen: str  # the observation; or why there is none
    advice: str = ""  # what to do; "": nothing
    name: str = ""  # of the check; :func:`examine` adds it


ok = partial(CheckResult, Verdict.OK)
warning = partial(CheckResult, Verdict.WARNING)  # with it a cluster may be slow, or fail later
failed = partial(CheckResult, Verdict.FAILED)  # with it a cluster cannot work
not_looked_at = partial(CheckResult, Verdict.NOT_LOOKED_AT)  # with the reason


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


def worst(results: Iterable[CheckResult]) -> CheckResult:
    """Return the first of the worst of several results."""
    return min(results, key=lambda result: list(Verdict).index(result.verdict))


def each(fact: str, look: Callable[[TrialFacts, NodeFacts, Any], CheckResult], facts: TrialFacts) -> CheckResult:
    """Return the worst result of the nodes, each judged by this fact of it, with the node's name."""

    def judge(node: NodeFacts) -> CheckResult:
        value = getattr(node, fact)
        missing = not_looked_at(node.unknown.get(fact, "it is not known"))
        result = missing if value is None else look(facts, node, value)
        return result._replace(seen=f"{node.host}: {result.seen}")

    return worst(map(judge, facts.nodes))


def exit_code(findings: Iterable[CheckResult]) -> int:
    """Return 1 if a check failed, else 0."""
    return int(any(finding.verdict is Verdict.FAILED for finding in findings))
