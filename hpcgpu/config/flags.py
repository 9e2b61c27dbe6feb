"""Options as they are typed at a command line: ``--gpus-per-node 4``."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from hpcgpu.model.settings import BY_NAME


def flag(name: str) -> str:
    """Return an option as it is typed."""
    return f"--{name.replace('_', '-')}"


def typed(name: str, value: Any) -> Iterator[str]:
    """Yield the words of an option with its value; a value of several parts repeats the option."""
    if isinstance(value, bool):
        yield flag(name if value else f"no_{name}")
        return
    value = [f"{key}={each}" for key, each in value.items()] if isinstance(value, Mapping) else value
    for each in value if isinstance(value, (list, tuple)) else [value]:
        yield from (flag(name), str(each))


def as_typed(part: str) -> str:
    """Return an option of a message as it is typed: ``--gpus-per-node 4`` for ``gpus_per_node=4``."""
    name, equals, text = part.partition("=")
    if name not in BY_NAME or not equals:
        return flag(part) if name in BY_NAME else part
    value: Any = text
    with contextlib.suppress(ValueError, SyntaxError):  # no value is meant, or an object
        value = ast.literal_eval(text)
    return " ".join(typed(name, "..." if value is ... else value)).rstrip()
