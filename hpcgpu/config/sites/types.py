"""Describe the types of a site file's keys: for the reference page, and for messages on wrong values."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from hpcgpu.config.values import nearest
from hpcgpu.errors import ConfigError
from hpcgpu.model.site import Path

_MISSING = re.compile("Object missing required field `(.*)`")
_OF_TYPES = ("Expected `", "Invalid enum value", "Object contains unknown field")
_LONGEST = 60


@cache
def hints(kind: type) -> dict[str, Any]:
    """Return the types of a block's keys."""
    keys = {field.name for field in fields(kind) if "text" in field.metadata}
    return {name: hint for name, hint in get_type_hints(kind).items() if name in keys}


def type_words(hint: Any) -> str:
    """Describe a type."""
    if get_origin(hint) is Literal:
        return ", ".join(f"`{word}`" for word in get_args(hint) if word != "")
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(dict.fromkeys(type_words(part) for part in get_args(hint) if part is not type(None)))
    if get_origin(hint) is tuple:
        args = get_args(hint)
        return f"list of {type_words(args[0])}" if args[1] is Ellipsis else "two numbers"
    if get_args(hint) or get_origin(hint) is Mapping:
        return "mapping"
    names = {str: "text", int: "number", float: "number", bool: "`true`, `false`"}
    return names.get(hint, "mapping")


def misfit(value: object, hint: Any) -> tuple[Path, str] | None:
    """Return why a value is not of a type, and the path to its innermost wrong part; None if it is."""
    try:
        msgspec.convert(value, hint)
    except (msgspec.ValidationError, ConfigError) as error:
        for key, part, of_part in _parts(value, hint):
            if found := misfit(part, of_part):
                return (key, *found[0]), found[1]
        said = str(error).partition(" - at `")[0]
        if missing := _MISSING.fullmatch(said):
            return (), f"{missing[1]} is missing, which must be given"
        return (), _wrong(value, hint) if said.startswith(_OF_TYPES) else said  # else it is a block's own message
    return None


def _parts(value: object, hint: Any) -> Iterator[tuple[str | int, object, Any]]:
    """Yield the parts of lists and mappings, and mappings' keys, each with its place and its type."""
    args = get_args(hint)
    if get_origin(hint) in (Union, UnionType):
        for part in args:
            yield from _parts(value, part)
    elif get_origin(hint) is tuple and isinstance(value, list):
        kinds = [args[0]] * len(value) if args[1] is Ellipsis else args
        if len(kinds) == len(value):
            yield from ((i, part, kind) for i, (part, kind) in enumerate(zip(value, kinds, strict=True)))
    elif get_origin(hint) is Mapping and isinstance(value, dict):
        yield from ((str(key), key, args[0]) for key in value)
        yield from ((str(key), part, args[1]) for key, part in value.items())


def _wrong(value: object, hint: Any) -> str:
    words = _words(hint)
    if words and isinstance(value, str):
        return f"{value!r} is given; {nearest(value, words)}"
    example = _example(hint)
    allowed = f"{type_words(hint).replace('`', '')}{f', such as {example}' if example else ''}"
    return f"{_shown(value)} is given; allowed: {allowed}"


def _shown(value: object) -> str:
    """Return a value in a file's notation."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return f"{str(value).lower()} (so YAML reads {'yes and on' if value else 'no and off'}, too)"
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _words(hint: Any) -> tuple[str, ...]:
    """Return the choices of a type; none for other types."""
    if get_origin(hint) is Literal:
        return tuple(word for word in get_args(hint) if isinstance(word, str) and word)
    return tuple(word for part in get_args(hint) for word in _words(part)) if get_args(hint) else ()


def _example(hint: Any) -> str:
    """Return how a list or a mapping of blocks is written; "" for other types."""
    args = get_args(hint)
    kind = args[0] if get_origin(hint) is tuple else args[-1] if args else None
    if not (isinstance(kind, type) and is_dataclass(kind)):
        return ""
    needed = [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING]
    block = f"{{{', '.join(f'{name}: ...' for name in needed) or '...'}}}"
    return f"[{block}]" if get_origin(hint) is tuple else f"{{NAME: {block}}}"
