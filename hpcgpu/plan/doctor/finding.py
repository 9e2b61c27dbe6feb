"""The doctor's findings: one line for each check, as text and as plain data."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar


class Verdict(enum.Enum):
    """The result of a check in one word."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    NOT_LOOKED_AT = "not looked at"


_WIDEST = max(len(verdict.value) for verdict in Verdict)


class CheckResult(NamedTuple):
    """The result of a check; ``advice`` is "" if all is well."""

    verdict: Verdict
    seen: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's report."""

    name: str  # of the check
    verdict: Verdict
    seen: str  # the observation; or why there is none
    advice: str = ""  # what to do; "": nothing


class Facts(Protocol):
    """Facts of which some may be None."""

    @property
    def unknown(self) -> Mapping[str, str]:
        """The reason for each fact that is None, by its name."""


F = TypeVar("F", bound=Facts)


class Check(NamedTuple, Generic[F]):
    """A check: its name, the facts that it needs, and the function that judges them."""

    name: str
    needs: tuple[str, ...]
    look: Callable[[F], CheckResult]


def examine(checks: Iterable[Check[F]], facts: F) -> tuple[Finding, ...]:
    """Run the checks; one whose facts are missing is reported as not looked at."""
    out = []
    for check in checks:
        missing = [need for need in check.needs if getattr(facts, need) is None]
        if missing:
            why = facts.unknown.get(missing[0], "it is not known here")
            out.append(Finding(check.name, Verdict.NOT_LOOKED_AT, why))
        else:
            out.append(Finding(check.name, *check.look(facts)))
    return tuple(out)


def ok(seen: str) -> CheckResult:
    """Return an OK result."""
    return CheckResult(Verdict.OK, seen)


def warning(seen: str, advice: str) -> CheckResult:
    """Return a result that may be slow, or fail later."""
    return CheckResult(Verdict.WARNING, seen, advice)


def failed(seen: str, advice: str) -> CheckResult:
    """Return a result that keeps a cluster from working."""
    return CheckResult(Verdict.FAILED, seen, advice)


def not_looked_at(why: str) -> CheckResult:
    """Return a result without an observation, and the reason."""
    return CheckResult(Verdict.NOT_LOOKED_AT, why)


def worst(results: Iterable[CheckResult]) -> CheckResult:
    """Return the first of the worst of several results."""
    order = (Verdict.FAILED, Verdict.WARNING, Verdict.OK, Verdict.NOT_LOOKED_AT)
    return min(results, key=lambda seen: order.index(seen.verdict))


def exit_code(findings: Iterable[Finding]) -> int:
    """Return 1 if a check failed, else 0."""
    return int(any(finding.verdict is Verdict.FAILED for finding in findings))


def render(findings: Iterable[Finding], paint: Callable[[Verdict, str], str] = lambda _, text: text) -> str:
    """Return the findings as aligned lines, the advice of each below it; ``paint`` colours the word of a verdict."""
    listed = list(findings)
    width = max((len(finding.name) for finding in listed), default=0)
    lines = []
    for finding in listed:
        word = paint(finding.verdict, f"{finding.verdict.value:<{_WIDEST}}")
        lines.append(f"{finding.name:<{width}}  {word}  {_one_line(finding.seen)}".rstrip())
        if finding.advice:
            lines.append(f"{'':<{width + _WIDEST + 4}}-> {_one_line(finding.advice)}")
    return "".join(f"{line}\n" for line in lines)


def described(findings: Iterable[Finding]) -> dict[str, Any]:
    """Return the findings as plain data."""
    listed = list(findings)
    return {
        "exit_code": exit_code(listed),
        "findings": [{"name": f.name, "verdict": f.verdict.value, "seen": f.seen, "advice": f.advice} for f in listed],
    }


def _one_line(text: str) -> str:
    """Join a text into one line; a batch system's messages may have several."""
    return " / ".join(" ".join(line.split()) for line in text.splitlines() if line.strip())
