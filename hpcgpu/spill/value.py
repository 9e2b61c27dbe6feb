"""Take device arrays out of a task's value, and put them back in."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

# Deeper containers are left as they are: who nests like this has not stored arrays but a tree.
_DEPTH = 8
_CONTAINERS = (list, tuple, dict)


class Slot(NamedTuple):
    """The place of a value's ``number``-th device array."""

    number: int


def take_apart(value: Any, is_array: Callable[[Any], bool]) -> tuple[Any, list[Any]]:  # noqa: ANN401
    """Return the value with slots where its device arrays were, and the arrays.

    Looks into lists, tuples, named tuples, dicts and dataclasses. A value without device arrays is returned as it is.
    """
    arrays: list[Any] = []
    kind: type = type(value)
    if not _is_container(kind):  # nearly all values: it pays not to walk them
        if not is_array(value):
            return value, arrays
        return Slot(0), [value]
    numbers: dict[int, int] = {}

    def out(x: Any) -> Slot | None:  # noqa: ANN401
        if not is_array(x):
            return None
        number = numbers.setdefault(id(x), len(arrays))
        if number == len(arrays):
            arrays.append(x)
        return Slot(number)

    rest = _mapped(value, out, _DEPTH)
    return rest, arrays


def put_together(rest: Any, arrays: Sequence[Any]) -> Any:  # noqa: ANN401
    """Return the value that :func:`take_apart` took apart."""
    return _mapped(rest, lambda x: arrays[x.number] if type(x) is Slot else None, _DEPTH)


@functools.lru_cache(256)
def _is_container(kind: type) -> bool:
    return kind in _CONTAINERS or issubclass(kind, tuple) or hasattr(kind, "__dataclass_fields__")


def _mapped(x: Any, change: Callable[[Any], Any], depth: int) -> Any:  # noqa: ANN401
    """Return ``x`` with its parts changed where ``change`` returns something; the same object where nothing changes."""
    changed = change(x)
    if changed is not None or depth == 0:
        return x if changed is None else changed
    kind = type(x)
    if kind in (list, tuple):
        parts = [_mapped(p, change, depth - 1) for p in x]
        return x if all(a is b for a, b in zip(parts, x, strict=True)) else kind(parts)
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        parts = [_mapped(p, change, depth - 1) for p in x]
        return x if all(a is b for a, b in zip(parts, x, strict=True)) else tuple.__new__(kind, parts)
    if kind is dict:
        found = {k: _mapped(v, change, depth - 1) for k, v in x.items()}
        return x if all(found[k] is v for k, v in x.items()) else found
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return _mapped_dataclass(x, change, depth)
    return x


def _mapped_dataclass(x: Any, change: Callable[[Any], Any], depth: int) -> Any:  # noqa: ANN401
    names = [f.name for f in dataclasses.fields(x) if hasattr(x, f.name)]
    found = {name: _mapped(getattr(x, name), change, depth - 1) for name in names}
    if all(found[name] is getattr(x, name) for name in names):
        return x
    other = copy.copy(x)
    for name, part in found.items():
        object.__setattr__(other, name, part)  # also of a frozen one
    return other
