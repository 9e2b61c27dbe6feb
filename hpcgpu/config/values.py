"""One value, read by the kind that its option declares: strict, and the same from Python, text or YAML."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any

from hpcgpu.errors import ConfigError
from hpcgpu.model.settings import user_name
from hpcgpu.model.simulated import parse_simulated
from hpcgpu.units import parse_bytes, parse_duration_s

FLAGS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
MARKS = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")  # no shell line or batch directive carries these; a tab is fine
NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?\s*", re.IGNORECASE)
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
SMALLEST = 1024  # a limit below is a slip: a fraction or a unit was meant
LIMIT = "allowed: a fraction of the memory (0.8 or '0.8', at most 1.0), a size ('5GB', 5_000_000_000), or 0 for none"


def read_value(option: Field[Any], value: object, where: str) -> Any:  # noqa: ANN401 - the option's own type
    """Return the value as :class:`~hpcgpu.model.Settings` holds it. Reading a read value changes nothing.

    Parameters
    ----------
    option : Field
        One of :func:`hpcgpu.model.settings.options`.
    value : object
        What was given: a Python value, or text.
    where : str
        Where it was set, for the message.

    Raises
    ------
    ConfigError
        Not a value of this option: what was given, what is allowed, where it was set.

    """
    if isinstance(value, Real) and not isinstance(value, bool):  # NumPy's numbers too
        value = int(value) if isinstance(value, Integral) else float(value)
    try:
        return READERS[option.metadata["kind"]](option, value)
    except ConfigError as error:
        raise ConfigError(f"{user_name(option)}: {error}; set by {where}") from error


def nearest(word: str, known: Iterable[str]) -> str:
    """Return what to say to somebody who typed a word that is not known."""
    from difflib import get_close_matches

    names = sorted(known)
    close = get_close_matches(word, names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"allowed: {', '.join(names)}"


def _count(_: Field[Any], value: object) -> int:
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{value!r} is not a count; allowed: a whole number from 1")
    return value


def _bytes(_: Field[Any], value: object) -> int:
    size = _size(value, "allowed: bytes as a number, or text such as '5GB', '512MiB'")
    if size == 0:
        raise ConfigError("0 bytes; allowed: a size such as '5GB', or nothing at all for what the site gives")
    return size


def _size(value: object, allowed: str) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # 5e9
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ConfigError(f"{value!r} is not a size; {allowed}")
    try:
        return parse_bytes(value)
    except (ConfigError, OverflowError) as error:
        raise ConfigError(f"{value!r} is not a size; {allowed}") from error


def _limit(_: Field[Any], value: object) -> float | int:
    """Bytes as int, a fraction as float. 1 is refused: it is one byte to dask-cuda, and 100 % to its reader."""
    if value == "default":  # dask-cuda's word for it
        return 0.8
    number = _number(value)
    if number is None:
        size = _size(value, LIMIT)
        if 0 < size < SMALLEST:
            raise ConfigError(f"{value!r} is less than {SMALLEST} bytes; {LIMIT}")
        return size
    if number == 0:
        return 0
    whole = isinstance(value, int) or (isinstance(value, str) and value.strip().isdecimal())
    if not whole and 0 < number <= 1:
        return number
    if number < 0 or not number.is_integer() or number < SMALLEST:
        one = " (1.0 is the whole memory; as a size it would be one byte)" if number == 1 else ""
        raise ConfigError(f"{value!r} is neither a fraction nor a size{one}; {LIMIT}")
    return int(value) if isinstance(value, (int, str)) and whole else int(number)


def _number(value: object) -> float | None:
    """Return a plain number, also from text; None for everything else."""
    if isinstance(value, bool) or not (isinstance(value, (int, float)) or NUMBER.fullmatch(str(value))):
        return None
    try:
        number = float(value)  # type: ignore[arg-type] # a number or its text, by the test above
    except OverflowError as error:
        raise ConfigError(f"{value!r} is too large") from error
    if not math.isfinite(number):
        raise ConfigError(f"{value!r} is not a finite number")
    return number


def _host_limit(option: Field[Any], value: object) -> float | int | None:
    return None if value == "auto" else _limit(option, value)  # Dask's word for a share of the node


def _duration(option: Field[Any], value: object) -> int:
    if not isinstance(value, (int, float, str)):
        raise ConfigError(f"{value!r} is not a duration; allowed: {option.metadata['example']}")
    try:
        seconds = parse_duration_s(value)
    except OverflowError as error:
        raise ConfigError(f"{value!r} is too long for a duration") from error
    if seconds < 1:
        raise ConfigError(f"{value!r} is less than a second; allowed: {option.metadata['example']}")
    return seconds


def _seconds(_: Field[Any], value: object) -> float:
    number = _number(value)
    if number is None and isinstance(value, str):
        number = float(parse_duration_s(value))
    if number is None or number < 0:
        raise ConfigError(f"{value!r} is not a time; allowed: seconds from 0, or text such as '30s', '2m'")
    return number


def _gpus(_: Field[Any], value: object) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{value!r} is not text; allowed: 'sim:4' or 'sim:4x256MiB' (simulated GPUs on each node)")
    parse_simulated(value)
    return value


def _choice(option: Field[Any], value: object) -> str:
    choices = option.metadata["choices"]
    if value in choices:
        return str(value)
    raise ConfigError(f"{value!r} is no choice: {nearest(str(value), choices)}")


def _text(_: Field[Any], value: object) -> str:
    if hasattr(value, "__fspath__"):
        value = value.__fspath__()
    if not isinstance(value, str):
        hint = f" (in quotes: '{value}')" if isinstance(value, int) and not isinstance(value, bool) else ""
        raise ConfigError(f"{value!r} is not text; allowed: text of one line{hint}")
    return _one_line(value)


def _one_line(value: str, what: str = "text") -> str:
    if not value.strip() or MARKS.search(value):
        raise ConfigError(f"{value!r} is no {what}: it is empty, or has a newline or control character")
    return value


def _texts(_: Field[Any], value: object) -> tuple[str, ...]:
    entries = _parts(value)
    if not isinstance(entries, Iterable) or isinstance(entries, (str, Mapping, bytes)):
        raise ConfigError(f"{value!r} is no list; allowed: a list of texts, or one text")
    found = tuple(entries)
    if wrong := [e for e in found if not isinstance(e, str)]:
        raise ConfigError(f"{wrong[0]!r} is not text; allowed: a list of texts of one line each")
    return tuple(_one_line(e) for e in found)


def _lines(option: Field[Any], value: object) -> tuple[str, ...]:
    """Read shell lines; a text of several lines is several, and empty lines go."""
    entries = _parts(value)
    if isinstance(entries, Iterable) and not isinstance(entries, (str, Mapping, bytes)):
        split = [e.replace("\r\n", "\n").split("\n") if isinstance(e, str) else [e] for e in entries]
        entries = [line for lines in split for line in lines if not isinstance(line, str) or line.strip()]
    return _texts(option, entries)


def _parts(value: object) -> object:
    """Return a text as a list of one, or what the JSON list or object in it says (environment variables)."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    if not text.startswith(("[", "{")):
        return [value] if text else []
    try:
        return json.loads(text)
    except ValueError:
        return [value]  # a shell line such as "{ module load cuda; }" or "[ -f x ] && . x"


def _flag(_: Field[Any], value: object) -> bool:
    found = FLAGS.get(value.strip().lower()) if isinstance(value, str) else value
    if not isinstance(found, bool):
        raise ConfigError(f"{value!r} is neither true nor false; allowed: True or False (as text: true, false)")
    return found


def _pairs(value: object, allowed: str) -> Mapping[Any, Any]:
    """Return a mapping, also from ``NAME=VALUE`` texts."""
    entries = _parts(value)
    if isinstance(entries, Mapping):
        return entries
    if not isinstance(entries, Iterable) or isinstance(entries, (str, bytes)):
        raise ConfigError(f"{value!r} is not a mapping; {allowed}")
    pairs = [e.partition("=") if isinstance(e, str) else (e, "", "") for e in entries]
    if wrong := [str(p[0]) for p in pairs if not p[1]]:
        raise ConfigError(f"{wrong[0]!r} has no '='; {allowed}")
    return {name.strip(): text for name, _, text in pairs}


def _numbers(_: Field[Any], value: object) -> Mapping[str, float]:
    allowed = "allowed: {'GPU': 1}, or as text GPU=1,MEM=2e9"
    if isinstance(value, str) and not value.strip().startswith("{"):
        value = [value]
    if isinstance(value, list):
        value = [part for text in value for part in (re.split(r"[,\s]+", text) if isinstance(text, str) else [text])]
        value = [part for part in value if part != ""]
    found: dict[str, float] = {}
    for name, given in _pairs(value, allowed).items():
        number = _number(given)
        if not isinstance(name, str) or number is None or number < 0:
            raise ConfigError(f"{name!r}: {given!r} is not a number from 0; {allowed}")
        found[_one_line(name, "name")] = number
    return MappingProxyType(found)


def _environment(_: Field[Any], value: object) -> Mapping[str, str]:
    found: dict[str, str] = {}
    for name, given in _pairs(value, "allowed: {'NAME': 'value'}, or as text NAME=value").items():
        if not isinstance(name, str) or not VARIABLE.fullmatch(name):
            raise ConfigError(f"{name!r} is no name of a variable; allowed: letters, digits and _, no digit first")
        text = str(given) if isinstance(given, (int, float)) and not isinstance(given, bool) else given
        if not isinstance(text, str) or MARKS.search(text):
            raise ConfigError(f"{name}: {given!r} is no value; allowed: text without newline or control character")
        found[name] = text
    return MappingProxyType(found)


READERS: Mapping[str, Callable[[Field[Any], object], Any]] = MappingProxyType(
    {
        "count": _count,
        "bytes": _bytes,
        "duration": _duration,
        "seconds": _seconds,
        "limit": _limit,
        "host-limit": _host_limit,
        "gpus": _gpus,
        "choice": _choice,
        "text": _text,
        "texts": _texts,
        "lines": _lines,
        "flag": _flag,
        "numbers": _numbers,
        "environment": _environment,
    }
)
