"""Group ids of array elements by array: no command grows with the number of elements."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from hpcgpu.errors import ConfigError


def by_array(job_ids: Sequence[str], element: re.Pattern[str]) -> Mapping[tuple[str, str], set[int]]:
    """Group ids by array: the parts of its elements' ids before and after the index, and the indexes.

    ``element`` matches an element's id in three groups: before the index, the index, after it. Another job is alone,
    without an index.
    """
    out: dict[tuple[str, str], set[int]] = {}
    for job_id in job_ids:
        found = element.fullmatch(job_id)
        indexes = out.setdefault((found[1], found[3]) if found else (job_id, ""), set())
        if found:
            indexes.add(int(found[2]))
    return out


def runs(indexes: Iterable[int]) -> tuple[str, ...]:
    """Return single indexes and ranges without a hole, in order: ``1``, ``3-4`` for 1, 3, 4."""
    out: list[tuple[int, int]] = []
    for index in sorted(set(indexes)):
        if out and out[-1][1] == index - 1:
            out[-1] = (out[-1][0], index)
        else:
            out.append((index, index))
    return tuple(str(first) if first == last else f"{first}-{last}" for first, last in out)


def split(count: int, limit: int) -> tuple[int, ...]:
    """Return the sizes of the fewest submissions for ``count`` jobs, none larger than ``limit``."""
    full, rest = divmod(count, limit)
    return (limit,) * full + ((rest,) if rest else ())


def check_limit(limit: int, system: str) -> None:
    """Raise ConfigError for a limit below one job."""
    if limit < 1:
        raise ConfigError(f"array_limit={limit} of {system}; allowed: 1 (no arrays) or more")
