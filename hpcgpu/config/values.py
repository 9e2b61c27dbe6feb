"""One value by its option's kind: read from a Python value or from text, and written as it is typed."""

from __future__ import annotations

import ast
import contextlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import Field
from types import MappingProxyType
from typing import Any

from hpcgpu.errors import ConfigError, opt
from hpcgpu.model import settings
from hpcgpu.model.allocation import parse_simulated
from hpcgpu.model.settings import BY_NAME, NIC_RULES, one_line, plain_number, user_name
from hpcgpu.units import DURATIONS, format_bytes, meant, parse_duration_s

Layer = Mapping[str, tuple[Any, str]]  # option's name as users type it -> value, where it was set
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# A value without '=', a comma, and what looks like another variable: not KMP_AFFINITY=verbose,granularity=fine, nor
# GODEBUG=a=1,B=2.
_TWO_VARIABLES = re.compile(r"(\s*[A-Za-z_][A-Za-z0-9_]*\s*)=([^=]*?),(\s*[A-Z_][A-Z0-9_]*=.*)")
_SMALLEST_NODE_BYTES = 1 << 20  # as a node's memory; no Python starts in less
CORES = ("all", "local")
_LOOPBACK = ("", "localhost", "127.0.0.1", "[::1]")
_HIGHEST_PORT = (1 << 16) - 1
_LIMIT = "float, int or str"


def read_value(option: Field[Any], value: object, where: str) -> Any:  # the option's own type
    """Read an option's value, a Python value or text, as Settings holds it; ConfigError, with ``where``, for others."""
    read, _ = KINDS[option.metadata["kind"]]
    return settings.read_option(user_name(option), value, where, lambda plain: read(option, plain))


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


def nearest(word: str, names: Iterable[str]) -> str:
    """Return a hint for an unknown word: the nearest known word, or all of them."""
    from difflib import get_close_matches

    options = sorted(names)
    close = get_close_matches(word, options, n=1)
    return f"did you mean {close[0]!r}?" if close else f"allowed: {', '.join(options)}"


def option_of(directive: str) -> str:
    """Parse a directive's option: ``--constraint`` of ``--constraint=gpu``, ``-l mem`` of ``-l mem=1gb``."""
    words = directive.partition("=")[0].split()
    return " ".join(words[: 2 if words[:1] == ["-l"] else 1])


def _whole(value: object, noun: str, least: int, allowed: str = "") -> int:
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{value!r} is not a {noun}; allowed: {allowed}a whole number from {least}")
    return value


def _port(option: Field[Any], value: object) -> int:
    """Read a port; Dask's address of a dashboard has a colon before it."""
    host, _, number = str(value).strip().rpartition(":")
    if host and "dashboard_address" not in option.metadata["aliases"]:
        number = ""
    elif host not in _LOOPBACK:
        raise ConfigError(
            f"{value!r} is not on loopback; elsewhere other users could reach the dashboard; give the port alone, such "
            "as ':8787'; ssh -L forwards it to another machine"
        )
    if isinstance(value, bool) or not number.isascii() or not number.isdecimal() or int(number) > _HIGHEST_PORT:
        raise ConfigError(f"{value!r} is not a port; allowed: 1 to {_HIGHEST_PORT}, or 0 for a free one")
    return int(number)


def _cores(_: Field[Any], value: object) -> str | int:
    words = "'all' (equal shares), 'local' (the cores on the GPU's NUMA node), or for each worker "
    return str(value) if value in CORES else _whole(value, "number of cores", 1, words)


def _nics(option: Field[Any], value: object) -> str | tuple[str, ...]:
    """Read a rule, or names of ports. A text with commas is a list."""
    texts = _texts(option, value)
    names = tuple(part.strip() for text in texts for part in text.split(",") if part.strip())
    if len(names) == 1 and names[0] in NIC_RULES:
        return names[0]
    if not names or (rules := sorted(set(names) & set(NIC_RULES))):
        problem = f"{rules[0]!r} is a rule and stands alone" if names else f"{value!r} has no name"
        raise ConfigError(f"{problem}; allowed: {', '.join(map(repr, NIC_RULES))}, or names such as 'mlx5_0,mlx5_1:2'")
    return names


def _node_bytes(_: Field[Any], value: object) -> int:
    """Read the size of a node's memory. A number is bytes, as everywhere; sbatch's would be MiB."""
    size = settings.read_size(value, "allowed: bytes as a number, or text such as '5GB', '512MiB'")
    if size < _SMALLEST_NODE_BYTES:
        raise ConfigError(
            f"{value!r} is {format_bytes(size)}{meant(value)}; allowed: a size from 1 MiB such as '5GB'; without "
            f"{opt('memory')} the site's default counts"
        )
    return size


def _duration(_: Field[Any], value: object) -> int:
    if not isinstance(value, str) or plain_number(value) is not None:
        raise ConfigError(f"{value!r} is not a duration: it has no unit; allowed: {DURATIONS}; in YAML with quotes")
    return parse_duration_s(value)


def _seconds(_: Field[Any], value: object) -> float:
    number = plain_number(value)
    if number is None and isinstance(value, str):
        number = float(parse_duration_s(value))
    if number is None or number < 0:
        raise ConfigError(f"{value!r} is not a time; allowed: seconds from 0, or text such as '30s', '2m'")
    return number


def _gpus(_: Field[Any], value: object) -> str:
    """Read simulated GPUs, or the number of all GPUs: digits, which ``config.sites.rules`` makes nodes of."""
    if plain_number(value) is not None and not isinstance(value, bool) and str(value).strip().isdecimal():
        return str(_whole(value, "number of GPUs", 1))
    if not isinstance(value, str) or re.fullmatch(r"[\d\s,]*", value):
        raise ConfigError(
            f"{value!r} is not a number of GPUs: give {opt('gpus_per_node', 4)}; {opt('gpus')} is the total at a "
            f"known site, {opt('gpus', 8)}, or simulated GPUs of each node, 'sim:4' or 'sim:4x256MiB' (as "
            f"{opt('simulate')})"
        )
    parse_simulated(value)
    return value


def _simulate(_: Field[Any], value: object) -> str:
    text = str(value).strip() if isinstance(value, (int, str)) and not isinstance(value, bool) else repr(value)
    parse_simulated(text, "")
    return text


def _choice(option: Field[Any], value: object) -> str:
    value = "ucx" if value == "ucxx" else value  # dask-cuda's and distributed's name of a protocol
    if value in (choices := option.metadata["choices"]):
        return str(value)
    raise ConfigError(f"{value!r} is not a choice; allowed: {', '.join(choices)}")


def _texts(option: Field[Any], value: object) -> tuple[str, ...]:
    """Read texts; of shell lines a text of several lines is several, and empty lines go."""
    entries = _parts(value)
    if not isinstance(entries, Iterable) or isinstance(entries, (str, Mapping, bytes)):
        raise ConfigError(f"{value!r} is not a list; allowed: a list of texts, or one text")
    texts = tuple(entries)
    if wrong := [e for e in texts if not isinstance(e, str)]:
        raise ConfigError(f"{wrong[0]!r} is not text; allowed: a list of texts of one line each")
    if option.metadata["kind"] == "lines":
        texts = tuple(line for e in texts for line in e.replace("\r\n", "\n").split("\n") if line.strip())
    return tuple(map(one_line, texts))


def _parts(value: object) -> object:
    """Return a text as a list of one, or the JSON list or object in it (environment variables)."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    if not text.startswith(("[", "{")):
        return [value] if text else []
    try:
        return json.loads(text)
    except ValueError:
        return [value]  # a shell line such as "{ module load cuda; }" or "[ -f x ] && . x"


def _flag(option: Field[Any], value: object) -> bool:
    if option.name == "security" and hasattr(value, "get_connection_args"):  # distributed's, without its import
        raise ConfigError(
            "a Security object is not accepted: each cluster makes its own certificate, which Client(cluster) uses; "
            f"leave security out (TLS is on), or give {opt('security', False)} (TLS is off)"
        )
    return settings.read_flag(value)


def _pairs(value: object, allowed: str, split: Callable[[str], Iterable[str]]) -> Mapping[Any, Any]:
    """Return a mapping, also from texts, each in JSON, or of what ``split`` makes ``NAME=VALUE``."""
    entries = _parts(value)
    if isinstance(entries, Mapping):
        return entries
    if not isinstance(entries, Iterable) or isinstance(entries, (str, bytes)):
        raise ConfigError(f"{value!r} is not a mapping; {allowed}")
    pairs: dict[Any, Any] = {}
    for entry in entries:
        if isinstance(plain := _parts(entry), Mapping):
            pairs |= plain
            continue
        for text in split(entry) if isinstance(entry, str) else [str(entry)]:
            name, equals, text_value = text.partition("=")
            if not equals:
                raise ConfigError(f"{text!r} has no '='; {allowed}")
            pairs[name.strip()] = text_value
    return pairs


def _one_variable(text: str) -> Iterator[str]:
    """Yield the text itself: the value of a variable may have commas."""
    if two := _TWO_VARIABLES.fullmatch(text):
        name, value, second = two.groups()
        as_json = json.dumps({name.strip(): f"{value},{second}"})
        raise ConfigError(
            f"{text!r} looks like two variables; give each by itself: '{name}={value}' and '{second.strip()}'; for one "
            f"variable with this value: {as_json}"
        )
    yield text


def _numbers(_: Field[Any], value: object) -> Mapping[str, float]:
    allowed = "allowed: {'GPU': 1}, or as text GPU=1, each by itself or with commas"
    numbers: dict[str, float] = {}
    for name, text_value in _pairs(value, allowed, lambda text: filter(None, re.split(r"[,\s]+", text))).items():
        number = plain_number(text_value)
        if not isinstance(name, str) or number is None or number < 0:
            raise ConfigError(f"{name!r}: {text_value!r} is not a number from 0; {allowed}")
        numbers[one_line(name, "name")] = number
    return MappingProxyType(numbers)


def _amount(_: Field[Any], value: object) -> float:
    number = plain_number(value)
    if number is None or number < 0:
        raise ConfigError(f"{value!r} is not a number from 0")
    return number


def _environment(_: Field[Any], value: object) -> Mapping[str, str]:
    variables: dict[str, str] = {}
    allowed = "allowed: {'NAME': 'value'}, or as text NAME=value, each by itself"
    for name, raw in _pairs(value, allowed, _one_variable).items():
        if not isinstance(name, str) or not VARIABLE.fullmatch(name):
            raise ConfigError(f"{name!r} is not a variable's name; allowed: letters, digits and _, no digit first")
        text = str(raw) if isinstance(raw, (int, float)) and not isinstance(raw, bool) else raw
        if not isinstance(text, str) or settings.MARKS.search(text):
            raise ConfigError(f"{name}: {raw!r} is not allowed; allowed: text without newline or control character")
        variables[name] = text
    return MappingProxyType(variables)


# The reader of each kind of option, and its types as numpydoc shows them; a choice has its values instead.
KINDS: Mapping[str, tuple[Callable[[Field[Any], object], Any], str]] = {
    "count": (lambda _, value: _whole(value, "count", 1), "int"),
    "port": (_port, "int or str"),
    "number": (lambda _, value: _whole(value, "number", 0), "int"),
    "cores": (_cores, "str or int"),
    "nics": (_nics, "str or list of str"),
    "amount": (_amount, "float"),
    "bytes": (_node_bytes, "int or str"),
    "duration": (_duration, "str"),
    "seconds": (_seconds, "float or str"),
    "limit": (lambda _, value: settings.read_limit(value), _LIMIT),
    "device-limit": (lambda _, value: settings.read_device_limit(value), _LIMIT),
    "host-limit": (lambda _, value: settings.read_host_limit(value), _LIMIT),
    "gpus": (_gpus, "int or str"),
    "simulate": (_simulate, "int or str"),
    "choice": (_choice, ""),
    "text": (lambda _, value: settings.read_text(value), "str"),
    **dict.fromkeys(("texts", "lines"), (_texts, "list of str")),
    "flag": (_flag, "bool"),
    "numbers": (_numbers, "dict of str to float"),
    "environment": (_environment, "dict of str to str"),
}
