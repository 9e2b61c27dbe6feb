"""Parse flags, texts and numbers as people write them: in Python, as text, or in YAML."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from numbers import Integral, Real
from typing import TypeVar

from hpcgpu.errors import ConfigError

FLAGS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
MARKS = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")  # no shell line or batch directive carries these; a tab is fine
_NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?\s*", re.IGNORECASE)
T = TypeVar("T")


def read_option(name: str, value: object, where: str, read: Callable[[object], T]) -> T:
    """Convert an option's value by ``read``, adding name and source to its ConfigError; NumPy's numbers are allowed."""
    if isinstance(value, Real) and not isinstance(value, bool):
        value = int(value) if isinstance(value, Integral) else float(value)
    elif is_numpys_flag(value):
        value = bool(value)
    try:
        return read(value)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}; set by {where}") from error


def is_numpys_flag(value: object) -> bool:
    """Tell whether a value is NumPy's bool, no subclass of Python's; NumPy is not imported for it."""
    kind = type(value)
    return kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_")  # of NumPy 2, and 1


def plain_number(value: object) -> float | None:
    """Parse a plain number, also from text; None for everything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    if isinstance(value, str) and not _NUMBER.fullmatch(value):
        return None
    try:
        number = float(value)
    except OverflowError as error:
        raise ConfigError(f"{value!r} is too large") from error
    if not math.isfinite(number):
        raise ConfigError(f"{value!r} is not a finite number")
    return number


def read_flag(value: object) -> bool:
    """Parse a flag, also from text: ``yes``, ``off``."""
    flag = FLAGS.get(value.strip().lower()) if isinstance(value, str) else value
    if not isinstance(flag, bool):
        raise ConfigError(f"{value!r} is neither true nor false; allowed: True or False (as text: true, false)")
    return flag


def read_text(value: object) -> str:
    """Parse text of one line, also from a path."""
    if hasattr(value, "__fspath__"):
        value = value.__fspath__()
    if not isinstance(value, str):
        hint = f" (in quotes: '{value}')" if isinstance(value, int) and not isinstance(value, bool) else ""
        raise ConfigError(f"{value!r} is not text; allowed: text of one line{hint}")
    return one_line(value)


def one_line(value: str, what: str = "text") -> str:
    """Return the text if it is not empty and has neither newline nor control character; raise otherwise."""
    if not value.strip() or MARKS.search(value):
        raise ConfigError(f"{value!r} is no {what}: it is empty, or has a newline or control character")
    return value
