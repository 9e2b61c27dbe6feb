"""Parse a site file's YAML into :class:`~hpcgpu.model.Site`; errors have the line."""

from __future__ import annotations

import copy
import functools
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass, replace
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
import yaml

from hpcgpu.config.values import nearest
from hpcgpu.errors import ConfigError
from hpcgpu.model.site import DIALECTS, Path, Site, dotted

VERSION = 2
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
_STEP = re.compile(r"\.(\w+)|\[(\d+|\.\.\.)\]")  # of msgspec's paths: $.nodes[...].ports[0].kind
_MISSING = re.compile("Object missing required field `(.*)`")
_LONGEST = 60
_Fail = Callable[[Path, str], ConfigError]
_Block = TypeVar("_Block")


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """YAML's safe loader, for which dates are text.

    libyaml's parser, if PyYAML was built with it: 0.8 CPU ms for polaris.yaml, where PyYAML's own takes 7.
    """


_Loader.add_constructor("tag:yaml.org,2002:timestamp", lambda _, node: node.value)


def read_site(text: str, name: str) -> Site:
    """Parse a site file, called ``name`` in messages; ConfigError with line, path and advice if it is wrong."""
    node, raw = _load(text, name)
    try:
        lines = dict(_lines(node, ()))
    except ConfigError as error:
        raise ConfigError(f"{name}, {error}") from error

    def fail(path: Path, message: str) -> ConfigError:
        line = next(lines[path[:end]] for end in range(len(path), -1, -1) if path[:end] in lines)
        return ConfigError(f"{name}, line {line}: {f'{dotted(path)}: ' if path else ''}{message}")

    if not isinstance(raw, dict):
        raise fail((), "a site file is a mapping with at least version, name and batch")
    if raw.get("version") != VERSION:
        raise fail(("version",), f"{raw.get('version')!r} is given; this hpcgpu reads version {VERSION}")
    site = _converted(raw, Site, (), fail)
    _converted(raw.get("dialect", {}), DIALECTS[site.batch], ("dialect",), fail)
    if not _NAME.fullmatch(site.name):
        raise fail(("name",), f"{site.name!r} is no name; allowed: small letters, digits, '.', '_', '-'")
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


def _lines(node: Any, path: Path, line: int = 0, above: tuple[Any, ...] = ()) -> Iterator[tuple[Path, int]]:
    """Yield the path and line of each value; ConfigError for a loop, and for a key given twice."""
    if any(node is ancestor for ancestor in above):
        raise ConfigError(f"line {line + 1}: an alias (*) stands inside of what it names (&); write it out")
    yield path, line + 1
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if key.value in seen:
                raise ConfigError(f"line {key.start_mark.line + 1}: {key.value!r} is given twice; say it once")
            seen.add(key.value)
            yield from _lines(value, (*path, str(key.value)), key.start_mark.line, (*above, node))
    elif isinstance(node, yaml.SequenceNode):
        for i, value in enumerate(node.value):
            yield from _lines(value, (*path, i), value.start_mark.line, (*above, node))


def _converted(raw: Any, kind: type[_Block], under: Path, fail: _Fail) -> _Block:
    """Convert plain data to a class of the schema, with all the classes in it; fail for a wrong value or key."""
    try:
        block = msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        message = str(error).partition(" - at `")[0]
        path = _path(raw, kind, str(error))
        raise fail((*under, *path), _explained(message, _at(raw, path), kind, path)) from error
    plain = msgspec.to_builtins(block, enc_hook=dict)  # of read-only mappings
    plain.pop("origins", None)
    for path, message in _unknown(raw, plain, under):
        raise fail(path, message)
    return block


def _path(raw: Any, kind: type, error: str) -> Path:
    """Return the path in msgspec's message, with the keys of mappings, which it does not name."""
    path: Path = ()
    for name, index in _STEP.findall(error.partition("`$")[2]):
        if index != "...":
            path = (*path, name or int(index))
            continue
        for key in _at(raw, path):
            others = copy.deepcopy(raw)
            del _at(others, path)[key]
            try:
                msgspec.convert(others, kind)
            except msgspec.ValidationError as another:
                if str(another) == error:  # it is in another entry
                    continue
            path = (*path, str(key))
            break
    return path


def _at(raw: Any, path: Path) -> Any:
    return functools.reduce(operator.getitem, path, raw)


def _explained(message: str, value: Any, kind: type, path: Path) -> str:
    """Return msgspec's message with the given value and the allowed ones; a block's own message as it is."""
    if missing := _MISSING.fullmatch(message):
        return f"{missing[1]} is missing, which must be given"
    if not message.startswith(("Expected `", "Invalid enum value")):
        return message
    text = repr(value)
    shown = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    if isinstance(value, bool):
        shown = f"{str(value).lower()} (so YAML reads {'yes and on' if value else 'no and off'}, too)"
    choices = _choices(kind, path)
    return f"{shown} is given; {nearest(str(value), choices) if choices else f'e{message[1:]}'}"


def _choices(hint: Any, path: Path) -> list[str]:
    """Return the words that a value may be."""
    if get_origin(hint) in (Union, UnionType):
        hint = get_args(hint)[0]
    if not path:
        return [word for word in get_args(hint) if isinstance(word, str) and word]
    if is_dataclass(hint):
        return _choices(get_type_hints(hint)[str(path[0])], path[1:])
    return _choices(get_args(hint)[1 if isinstance(path[0], str) else 0], path[1:])


def _unknown(raw: Any, plain: Any, path: Path) -> Iterator[tuple[Path, str]]:
    """Yield keys that the schema does not have, and texts that no script can carry; ``plain`` is the converted file."""
    if isinstance(raw, str) and _CONTROL.search(raw):
        yield path, f"{raw!r} has a control character; take it out"
    elif isinstance(raw, dict):
        for key, value in raw.items():
            if key not in plain:
                yield (*path, str(key)), f"no such key; {nearest(str(key), plain)}"
            else:
                yield from _unknown(value, plain[key], (*path, str(key)))
    elif isinstance(raw, list):
        for i, (value, converted) in enumerate(zip(raw, plain, strict=True)):
            yield from _unknown(value, converted, (*path, i))
