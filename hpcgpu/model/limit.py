"""Flags, texts and numbers as people write them in Python, as text or in YAML; memory limits for all that use them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import TypeVar

from hpcgpu.errors import ConfigError
from hpcgpu.units import meant, parse_bytes

FLAGS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
MARKS = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")  # no shell line or batch directive carries these; a tab is fine
_NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?\s*", re.IGNORECASE)
T = TypeVar("T")


def read_option(name: str, value: object, where: str, read: Callable[[object], T]) -> T:
    """Convert an option's value by ``read``, adding name and source to its ConfigError; NumPy's numbers are allowed."""
    if isinstance(value, Real) and not isinstance(value, bool):
        value = int(value) if isinstance(value, Integral) else float(value)
    elif type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_"):  # of NumPy 2, and 1
        value = bool(value)  # it is no subclass of Python's
    try:
        return read(value)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}; set by {where}") from error


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


_SMALLEST = 1024  # a smaller limit is a typing error: a fraction or a unit was meant
_SIZE = "a size ('5GB', 5_000_000_000)"
_NONE = "or 0 or 'off' for none"
_LIMIT = f"allowed: a fraction of the memory (0.8 or '0.8', at most 1.0), {_SIZE}, {_NONE}"
GPU_MEMORY = "the size of this GPU's memory (NVML does not answer)"
NODE_MEMORY = "the host memory of this node"
_PART = f"allowed: a fraction from 0 to 1 (0.6 or '0.6'), {_NONE}"


@dataclass(frozen=True, slots=True, repr=False)
class Limit:
    """Limit memory by bytes, by a part of it, by an equal share of it, or not at all (false).

    ConfigError for any other value; the read functions below parse user input.
    """

    value: int | float | str = 0  # bytes, 0: no limit; float in (0, 1]: a part of the memory; "auto": an equal share

    def __post_init__(self) -> None:
        value = self.value
        ok = 0 < value <= 1 if isinstance(value, float) else value == "auto" or (isinstance(value, int) and value >= 0)
        if not ok or isinstance(value, bool):
            raise ConfigError(f"{value!r} is no limit; allowed: bytes as int, a part as float, 'auto'")

    def __bool__(self) -> bool:
        return bool(self.value)

    def __repr__(self) -> str:
        return repr(self.value)

    @property
    def is_part(self) -> bool:
        """True if it is a fraction of a memory."""
        return isinstance(self.value, float)

    @property
    def is_share(self) -> bool:
        """True if it is an equal share of a memory."""
        return isinstance(self.value, str)

    @property
    def nbytes(self) -> int:
        """The bytes, if given as bytes; else 0."""
        return self.value if isinstance(self.value, int) else 0

    def bytes_of(self, memory_bytes: int, setting: str, memory: str, workers: int = 1) -> int:
        """Compute the limit in bytes, 0 for none; ``memory_bytes=0``: unknown, a ConfigError for a fraction."""
        # The error names setting (rmm_pool_size=0.5, and its source) and memory ("the size of this GPU's memory").
        if isinstance(self.value, str):
            return memory_bytes // max(workers, 1)
        if isinstance(self.value, int):
            return self.value
        if not memory_bytes:
            name = setting.partition("=")[0]
            raise ConfigError(
                f"{setting} is a fraction, but {memory} is not known: give it in bytes, such as {name}='30GB'"
            )
        return int(self.value * memory_bytes)

    def of_device(self, memory_bytes: int, setting: str = "") -> int:
        """Compute the bytes on a device at which spilling begins, at most its size; 0: never."""
        # memory_bytes is the device's memory or the worker's share of it; 0: unknown, a ConfigError for a fraction.
        setting = setting or f"device_memory_limit={self!r}"
        size = self.bytes_of(memory_bytes, setting, GPU_MEMORY)
        return min(size, memory_bytes) if memory_bytes else size


NO_LIMIT = Limit(0)
SHARE = Limit("auto")
DEVICE = Limit(0.8)  # as dask-cuda's


def read_limit(value: object) -> Limit:
    """Parse a user's limit. 1 is refused: it is one byte to dask-cuda, and 100 % to its reader."""
    if isinstance(value, Limit):
        return value
    if _is_none(value):
        return NO_LIMIT
    number = plain_number(value)
    if number is None:
        return Limit(_checked(value, _LIMIT))
    whole = isinstance(value, int) or (isinstance(value, str) and value.strip().isdecimal())
    if not whole and 0 < number <= 1:
        return Limit(number)
    if number < 0 or not number.is_integer() or 0 < number < _SMALLEST:
        hint = " (1.0 is the whole memory; as a size it would be one byte)" if number == 1 else ""
        raise ConfigError(f"{value!r} is neither a fraction nor a size{hint or meant(value)}; {_LIMIT}")
    return Limit(int(value) if isinstance(value, (int, str)) and whole else int(number))


def read_device_limit(value: object) -> Limit:
    """Parse a limit, or ``default``, which dask-cuda allows for this option alone (utils.py, 26.10)."""
    return DEVICE if value == "default" else read_limit(value)


def read_host_limit(value: object) -> Limit:
    """Parse a limit, or ``auto``: Dask's word for a share of the node."""
    return SHARE if value == "auto" else read_limit(value)


def read_disk_limit(value: object) -> int:
    """Parse a limit into bytes; 0: no limit. A fraction of a disk is not allowed."""
    if _is_none(value):
        return 0
    return _checked(value, f"allowed: {_SIZE}, {_NONE}")


def read_part(value: object) -> float:
    """Parse a part of a limit; 0: no limit."""
    if _is_none(value):
        return 0.0
    number = plain_number(value)
    if number is None or not 0 <= number <= 1:
        raise ConfigError(f"{value!r} is no fraction; {_PART}")
    return number


def read_size(value: object, allowed: str) -> int:
    """Parse a size into bytes, from a number or from text with a unit."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # 5e9
    try:
        return parse_bytes(value)
    except (ConfigError, OverflowError) as error:
        raise ConfigError(f"{value!r} is not a size; {allowed}") from error


def _is_none(value: object) -> bool:
    return value is None or value is False or value == "off"  # YAML reads off as False


def _checked(value: object, allowed: str) -> int:
    size = read_size(value, allowed)
    if size < _SMALLEST and re.search("[1-9]", str(value)):  # '0.0001KB' is below one byte, but is not "no limit"
        raise ConfigError(f"{value!r} is less than {_SMALLEST} bytes{meant(value)}; {allowed}")
    return size
