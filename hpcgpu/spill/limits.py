"""Where spilling begins, from what users write."""

from __future__ import annotations

from hpcgpu.errors import ConfigError
from hpcgpu.units import parse_bytes

_ALLOWED = (
    "allowed: bytes (5_000_000_000 or '5GB'), a fraction of the memory in (0, 1] (0.8 or '0.8'), or 0 or None for never"
)
_OFF = (None, 0, "0", "off", False)


def read_limit(name: str, value: float | str | None) -> int | float:
    """Return bytes as int, a fraction as float, 0 for never.

    Raises
    ------
    ConfigError
        A number that is neither a fraction nor a size, or text that is no size.

    """
    if value in _OFF:
        return 0
    number = value
    if isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            return _read_bytes(name, value)
    if isinstance(number, float) and 0 < number <= 1:
        return number
    if (
        isinstance(number, bool)
        or not isinstance(number, (int, float))
        or number <= 1
        or not float(number).is_integer()
    ):
        raise ConfigError(f"{name}={value!r} is neither a size nor a fraction; {_ALLOWED}")
    return int(number)


def size_of(name: str, value: float | str | None) -> int:
    """Return bytes, 0 for never.

    Raises
    ------
    ConfigError
        Neither a size nor off; a fraction, too: of what, is not known here.

    """
    limit = read_limit(name, value)
    if isinstance(limit, float):
        raise ConfigError(f"{name}={value!r} must be a size for the store; allowed: bytes or '8GB'")
    return limit


def _read_bytes(name: str, text: str) -> int:
    try:
        return parse_bytes(text)
    except ConfigError as e:
        raise ConfigError(f"{name}={text!r} is not a size; {_ALLOWED}") from e


def bytes_of(limit: int | float, memory_bytes: int) -> int:
    """Return the limit in bytes, for a memory of the given size; 0 is never."""
    return int(limit * memory_bytes) if isinstance(limit, float) else limit
