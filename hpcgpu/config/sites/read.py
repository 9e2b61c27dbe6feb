"""Parse a site file's YAML into :class:`~hpcgpu.model.Site`; errors have the line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass, replace
from functools import cache
from types import MappingProxyType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import yaml

from hpcgpu.config.sites.contradictions import contradictions
from hpcgpu.config.values import nearest
from hpcgpu.errors import ConfigError
from hpcgpu.model.dialect import DIALECTS
from hpcgpu.model.site import Path, Site

VERSION = 2
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
# The keys of version 2 in place of version 1's.
_MOVED: Mapping[str, str] = MappingProxyType(
    {
        "gpus_per_node": "nodes: {gpu: {gpus: 4}}",
        "ucx": "network: {ucx: false}",
        "required": "rules: [{require: walltime}], and account: {needed: true}",
    }
)


# libyaml's parser, if PyYAML was built with it: 0.8 CPU ms for polaris.yaml, where PyYAML's own takes 7.
class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """YAML's safe loader, for which dates are text."""


_Loader.add_constructor("tag:yaml.org,2002:timestamp", lambda _, node: node.value)


def read_site(text: str, name: str) -> Site:
    """Parse a site file, called ``name`` in messages; ConfigError with line, path and advice if it is wrong."""
    node, raw = _load(text, name)
    try:
        lines = dict(_lines(node, ()))
    except ConfigError as error:
        raise ConfigError(f"{name}, {error}") from error

    def fail(path: Path, message: str) -> ConfigError:
        where = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path).lstrip(".")
        line = next(lines[path[:end]] for end in range(len(path), -1, -1) if path[:end] in lines)
        return ConfigError(f"{name}, line {line}: {f'{where}: ' if where else ''}{message}")

    if not isinstance(raw, dict):
        raise fail((), "a site file is a mapping with at least version, name and batch")
    if raw.get("version") != VERSION:
        moved = "".join(f"; {old} is {new} now" for old, new in _MOVED.items() if old in raw)
        raise fail(("version",), f"{raw.get('version')!r} is given; this hpcgpu reads version {VERSION}{moved}")
    if (twice := _twice(node)) is not None:
        raise ConfigError(f"{name}, line {twice[1]}: {twice[0]!r} is given twice; say it once")
    for path, message in (*_problems(raw, Site), *_dialect_problems(raw)):
        raise fail(path, message)
    site: Site = msgspec.convert(raw, Site)
    for path, message in (*_texts(raw, ()), *contradictions(site)):
        raise fail(path, message)
    return replace(site, origins={path: f"{name}:{line}" for path, line in lines.items()})


def _load(text: str, name: str) -> tuple[Any, Any]:
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        return node, loader.construct_document(node) if node else None
    except yaml.YAMLError as error:
        raise ConfigError(_not_yaml(error, text, name)) from error
    finally:
        loader.dispose()


def _not_yaml(error: yaml.YAMLError, text: str, name: str) -> str:
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is None:  # characters that YAML does not allow
        return f"{name}: not YAML: {error}"
    lines = text.splitlines()
    line = lines[mark.line] if mark.line < len(lines) else ""
    tab = "; it begins with a tab, and YAML takes blanks only" if line.startswith("\t") else ""
    context = getattr(error, "context", None) or ""
    at = min(mark.line + 1, len(lines))  # an end that comes too soon is behind the last line
    return f"{name}, line {at}: not YAML: {problem}{f' ({context})' if context else ''}{tab}"


def _twice(node: Any) -> tuple[str, int] | None:  # a node of YAML
    """Return a key that a mapping has twice, and its line; plain YAML silently takes the last."""
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if key.value in seen:
                return key.value, key.start_mark.line + 1
            seen.add(key.value)
            if repeated := _twice(value):
                return repeated
    elif isinstance(node, yaml.SequenceNode):
        return next(filter(None, map(_twice, node.value)), None)
    return None


def _lines(node: Any, path: Path, line: int = 0, above: tuple[Any, ...] = ()) -> Iterator[tuple[Path, int]]:
    """Yield the path to each value with the line of its key, or of its list entry, from 1; ConfigError for a loop."""
    if any(node is ancestor for ancestor in above):
        raise ConfigError(f"line {line + 1}: an alias (*) stands inside of what it names (&); write it out")
    yield path, line + 1
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield from _lines(value, (*path, str(key.value)), key.start_mark.line, (*above, node))
    elif isinstance(node, yaml.SequenceNode):
        for i, value in enumerate(node.value):
            yield from _lines(value, (*path, i), value.start_mark.line, (*above, node))


def _blocks(raw: Any, hint: Any, path: Path = ()) -> Iterator[tuple[Path, type, dict[Any, Any]]]:
    """Yield each mapping that must be a block of the schema, from the outermost to the innermost."""
    if get_origin(hint) in (Union, UnionType):
        for part in get_args(hint):
            yield from _blocks(raw, part, path)
    elif isinstance(hint, type) and is_dataclass(hint) and isinstance(raw, dict):
        yield path, hint, raw
        for name, of_field in hints(hint).items():
            if name in raw:
                yield from _blocks(raw[name], of_field, (*path, name))
    elif get_origin(hint) is tuple and isinstance(raw, list):
        for i, item in enumerate(raw):
            yield from _blocks(item, get_args(hint)[0], (*path, i))
    elif isinstance(raw, dict) and len(get_args(hint)) == 2:
        for key, value in raw.items():
            yield from _blocks(value, get_args(hint)[1], (*path, str(key)))


def _problems(raw: dict[Any, Any], kind: type, under: Path = ()) -> Iterator[tuple[Path, str]]:
    """Yield violations of the schema: unknown keys first, then the innermost wrong value."""
    blocks = list(_blocks(raw, kind, under))
    for path, block, entries in blocks:
        for key in entries:
            if key not in hints(block):
                yield (*path, str(key)), f"no such key; {nearest(str(key), hints(block))}"
    for path, block, entries in reversed(blocks):
        for name, hint in hints(block).items():
            if name in entries and (problem := misfit(entries[name], hint)):
                yield (*path, name, *problem[0]), problem[1]
        if problem := misfit(entries, block):
            yield (*path, *problem[0]), problem[1]


def _dialect_problems(raw: dict[Any, Any]) -> Iterator[tuple[Path, str]]:
    entries = raw.get("dialect", {})
    kind: type | None = DIALECTS.get(raw.get("batch", ""))
    if kind is None or not isinstance(entries, dict):
        return
    others: dict[str, type] = {batch: other for batch, other in DIALECTS.items() if other is not kind}
    for batch, other in others.items():
        for key in entries.keys() & hints(other).keys() - hints(kind).keys():
            yield ("dialect", str(key)), f"batch: {batch} has this key, and batch: {raw['batch']} has not"
    yield from _problems(entries, kind, ("dialect",))


def _texts(raw: Any, path: Path) -> Iterator[tuple[Path, str]]:
    """Yield texts that no script can carry, and a name that no file can have."""
    if not path and not _NAME.fullmatch(raw["name"]):
        yield ("name",), f"{raw['name']!r} is no name; allowed: small letters, digits, '.', '_', '-'"
    if isinstance(raw, str) and _CONTROL.search(raw):
        yield path, f"{raw!r} has a control character; take it out"
    parts = raw.items() if isinstance(raw, dict) else enumerate(raw) if isinstance(raw, list) else ()
    for key, value in parts:
        yield from _texts(value, (*path, key))


def as_plain(block: Any) -> dict[str, Any]:  # a block of the schema
    """Return a block's values that are not its defaults."""
    plain = asdict(block)
    defaults = {f.name: f.default_factory() if f.default_factory is not MISSING else f.default for f in fields(block)}
    return {name: value for name, value in plain.items() if value != defaults[name]}


# --- the types of a file's keys: for the reference page, and for messages on wrong values

_MISSING = re.compile("Object missing required field `(.*)`")
_OF_TYPES = ("Expected `", "Invalid enum value", "Object contains unknown field")
_LONGEST = 60


@cache
def hints(kind: type) -> dict[str, Any]:
    """Return the types of a block's keys."""
    keys = {field.name for field in fields(kind) if "text" in field.metadata}
    return {name: hint for name, hint in get_type_hints(kind).items() if name in keys}


def format_type(hint: Any) -> str:
    """Describe a type."""
    if get_origin(hint) is Literal:
        return ", ".join(f"`{word}`" for word in get_args(hint) if word != "")
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(dict.fromkeys(format_type(part) for part in get_args(hint) if part is not type(None)))
    if get_origin(hint) is tuple:
        args = get_args(hint)
        return f"list of {format_type(args[0])}" if args[1] is Ellipsis else "two numbers"
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
            if inner := misfit(part, of_part):
                return (key, *inner[0]), inner[1]
        message = str(error).partition(" - at `")[0]
        if missing := _MISSING.fullmatch(message):
            return (), f"{missing[1]} is missing, which must be given"
        return (), _wrong(value, hint) if message.startswith(_OF_TYPES) else message  # else it is a block's own message
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
    choices = _choices(hint)
    if choices and isinstance(value, str):
        return f"{value!r} is given; {nearest(value, choices)}"
    example = _example(hint)
    allowed = f"{format_type(hint).replace('`', '')}{f', such as {example}' if example else ''}"
    return f"{_shown(value)} is given; allowed: {allowed}"


def _shown(value: object) -> str:
    """Return a value in a file's notation."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return f"{str(value).lower()} (so YAML reads {'yes and on' if value else 'no and off'}, too)"
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _choices(hint: Any) -> tuple[str, ...]:
    """Return the choices of a type; none for other types."""
    if get_origin(hint) is Literal:
        return tuple(word for word in get_args(hint) if isinstance(word, str) and word)
    return tuple(word for part in get_args(hint) for word in _choices(part)) if get_args(hint) else ()


def _example(hint: Any) -> str:
    """Return how a list or a mapping of blocks is written; "" for other types."""
    args = get_args(hint)
    kind = args[0] if get_origin(hint) is tuple else args[-1] if args else None
    if not (isinstance(kind, type) and is_dataclass(kind)):
        return ""
    needed = [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING]
    block = f"{{{', '.join(f'{name}: ...' for name in needed) or '...'}}}"
    return f"[{block}]" if get_origin(hint) is tuple else f"{{NAME: {block}}}"
