"""Figures of benchmarks as JSON lines: the median of the runs, with the least and the most of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from statistics import median
from typing import Any


def figure(bench: str, case: str, who: str, measure: str, values: Sequence[float], unit: str) -> dict[str, Any]:
    """Return a figure of one value per run."""
    spread = [round(min(values), 4), round(max(values), 4)]
    names = {"bench": bench, "case": case, "who": who, "measure": measure}
    return {**names, "value": round(median(values), 4), "unit": unit, "runs": len(values), "spread": spread}


def missing(bench: str, case: str, who: str, measure: str, why: str, unit: str) -> dict[str, Any]:
    """Return a figure that was not measured, with the reason."""
    names = {"bench": bench, "case": case, "who": who, "measure": measure}
    return {**names, "value": None, "unit": unit, "runs": 0, "why": why}


def report(bench: str, case: str, who: str, measure: str, values: Sequence[float], unit: str) -> None:
    """Print a figure."""
    print(json.dumps(figure(bench, case, who, measure, values, unit)), flush=True)
