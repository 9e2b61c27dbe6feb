"""Sizes and limits of memory: bytes, text with a unit, or a fraction."""

from __future__ import annotations

import math
import re
from dataclasses import Field
from typing import Any

from hpcgpu.errors import ConfigError
from hpcgpu.units import parse_bytes

_NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?\s*", re.IGNORECASE)
_SMALLEST = 1024  # a limit below is a slip: a fraction or a unit was meant
_LIMIT = (
    "allowed: a fraction of the memory (0.8 or '0.8', at most 1.0), a size ('5GB', 5_000_000_000), "
    "or 0 or 'off' for none"
)


def read_bytes(_: Field[Any], value: object) -> int:
    """Read a size above 0."""
    size = _size(value, "allowed: bytes as a number, or text such as '5GB', '512MiB'")
    if size == 0:
        raise ConfigError("0 bytes; allowed: a size such as '5GB', or nothing at all for what the site gives")
    return size


def read_limit(option: Field[Any], value: object) -> float | int:
    """Bytes as int, a fraction as float. 1 is refused: it is one byte to dask-cuda, and 100 % to its reader."""
    # dask-cuda's word, for this option alone: its parse_device_bytes, for RMM's sizes, refuses it (utils.py, 26.10)
    if value == "default" and option.name == "device_memory_limit":
        return 0.8
    if value is False or value == "off":  # YAML reads off as False
        return 0
    number = plain_number(value)
    if number is None:
        size = _size(value, _LIMIT)
        if 0 < size < _SMALLEST:
            raise ConfigError(f"{value!r} is less than {_SMALLEST} bytes; {_LIMIT}")
        return size
    if number == 0:
        return 0
    whole = isinstance(value, int) or (isinstance(value, str) and value.strip().isdecimal())
    if not whole and 0 < number <= 1:
        return number
    if number < 0 or not number.is_integer() or number < _SMALLEST:
        one = " (1.0 is the whole memory; as a size it would be one byte)" if number == 1 else ""
        raise ConfigError(f"{value!r} is neither a fraction nor a size{one}; {_LIMIT}")
    return int(value) if isinstance(value, (int, str)) and whole else int(number)


def read_host_limit(option: Field[Any], value: object) -> float | int | None:
    """Read a limit, or ``auto``: Dask's word for a share of the node."""
    return None if value == "auto" else read_limit(option, value)


def plain_number(value: object) -> float | None:
    """Return a plain number, also from text; None for everything else."""
    if isinstance(value, bool) or not (isinstance(value, (int, float)) or _NUMBER.fullmatch(str(value))):
        return None
    try:
        number = float(value)  # type: ignore[arg-type] # a number or its text, by the test above
    except OverflowError as error:
        raise ConfigError(f"{value!r} is too large") from error
    if not math.isfinite(number):
        raise ConfigError(f"{value!r} is not a finite number")
    return number


def _size(value: object, allowed: str) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # 5e9
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ConfigError(f"{value!r} is not a size; {allowed}")
    try:
        return parse_bytes(value)
    except (ConfigError, OverflowError) as error:
        raise ConfigError(f"{value!r} is not a size; {allowed}") from error
