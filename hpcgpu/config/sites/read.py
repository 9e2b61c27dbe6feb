"""Parse a site file's YAML into :class:`~hpcgpu.model.Site`; errors have the line. Find contradictions in it.

Together: contradictions have the lines and paths of the parsed file.
"""

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

from hpcgpu.config.layers import read_layer
from hpcgpu.config.values import nearest, option_of
from hpcgpu.errors import ConfigError, whole
from hpcgpu.model.settings import options, user_name
from hpcgpu.model.site import DIALECTS, Path, Site, SlurmDialect, dotted, tags_of
from hpcgpu.units import format_duration, parse_duration_s

VERSION = 2
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
_STEP = re.compile(r"\.(\w+)|\[(\d+|\.\.\.)\]")  # of msgspec's paths: $.nodes[...].ports[0].kind
_MISSING = re.compile("Object missing required field `(.*)`")
_LONGEST = 60
_Fail = Callable[[Path, str], ConfigError]
_Block = TypeVar("_Block")
_KNOWN = frozenset(user_name(f) for f in options()) - {"site"}


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


def contradictions(site: Site) -> Iterator[str]:
    """Yield each value that contradicts another or names a missing one: its place, its path, the reason."""
    for path, message in (*_names(site), *_forbidden(site), *_defaults(site)):
        yield f"{site.at(*path)}: {dotted(path)}: {message}"


def _names(site: Site) -> Iterator[tuple[Path, str]]:
    for path, _, tags in site.blocks():
        for tag in tags_of(tags):
            if tag not in site.sources:
                yield (*path, "source"), f"{tag!r} is not among the sources; {nearest(tag, site.sources) or 'none'}"
    names = [queue.name for queue in site.queues]
    for i, queue in enumerate(site.queues):
        if queue.name in names[:i]:
            yield ("queues", i, "name"), f"{queue.name!r} is there twice; a queue has one entry"
        if queue.node and queue.node not in site.nodes:
            yield ("queues", i, "node"), f"{queue.node!r} is no type of nodes; {nearest(queue.node, site.nodes)}"
        node = site.node(queue.name)
        if node and queue.nodes and queue.gpus and queue.gpus[0] > queue.nodes[1] * node.gpus:
            yield ("queues", i, "gpus"), f"{queue.nodes[1]} nodes of {node.gpus} GPUs have fewer than {queue.gpus[0]}"
    for i, rule in enumerate(site.rules):
        if rule.require and not rule.require.startswith("-") and rule.require not in _KNOWN:
            yield ("rules", i, "require"), f"{rule.require!r} is no setting; {nearest(rule.require, _KNOWN)}"
        if rule.forbid and not rule.forbid.startswith("-"):
            yield ("rules", i, "forbid"), f"{rule.forbid!r} is no option of a batch system, such as --mem"


def _forbidden(site: Site) -> Iterator[tuple[Path, str]]:
    forbidden = {rule.forbid: i for i, rule in enumerate(site.rules) if rule.forbid}
    for i, rule in enumerate(site.rules):
        if rule.require in forbidden:
            other = forbidden[rule.require]
            yield ("rules", i, "require"), f"{rule.require} is required here and forbidden by rules[{other}]"
    if site.batch == "slurm":
        for key in ("gpus", "memory", "cpus"):  # what the script has if the file does not say; cpus: --cpus-per-task
            value = site.dialect.get(key, getattr(SlurmDialect(), key))
            option = "--cpus-per-task" if value is True else f"--{value}"
            if option in forbidden:
                yield (
                    ("dialect", key) if key in site.dialect else ("rules", forbidden[option], "forbid"),
                    f"{option} is forbidden, but dialect.{key} writes it: write dialect: "
                    f"{{{key}: {'false' if key == 'cpus' else 'none'}}}",
                )
    lists: list[tuple[Path, Any]] = [(("queues", i, "directives"), q.directives) for i, q in enumerate(site.queues)]
    for path, texts in [*lists, (("defaults", "job_extra_directives"), site.defaults.get("job_extra_directives", ()))]:
        for text in texts if isinstance(texts, (list, tuple)) else (texts,):
            if (option := option_of(str(text))) in forbidden:
                yield path, f"{text!r} is given, but {option} is forbidden by rules[{forbidden[option]}]"


def _defaults(site: Site) -> Iterator[tuple[Path, str]]:
    if "site" in site.defaults:
        yield ("defaults", "site"), "'site' is no setting that a site can have"
    wrong = set()
    for name, value in site.settings.items():
        try:
            read_layer({name: value}, lambda _: "this file")
        except ConfigError as error:
            wrong.add(name)
            yield ("defaults", name), whole(error, lambda part: part.replace("=", ": ", 1).rstrip())  # as YAML has it
    queue, named = site.queue(None), site.defaults.get("queue")
    if site.queues and named and not queue:
        hint = nearest(str(named), [q.name for q in site.queues])
        yield ("defaults", "queue"), f"{named!r} is not among the queues; {hint}"
    if len(site.nodes) > 1 and site.queues and any(not q.node for q in site.queues):
        which = next(i for i, q in enumerate(site.queues) if not q.node)
        yield ("queues", which), f"there are {len(site.nodes)} types of nodes: say node: {' or '.join(site.nodes)}"
    # numbers that the default queue and its nodes do not have
    nodes, each = site.defaults.get("nodes"), site.defaults.get("gpus_per_node")
    if queue and queue.nodes and isinstance(nodes, int) and not queue.nodes[0] <= nodes <= queue.nodes[1]:
        yield ("defaults", "nodes"), f"{nodes}, but queue {queue.name} takes {queue.nodes[0]} to {queue.nodes[1]} nodes"
    if (node := site.node()) and isinstance(each, int) and each > node.gpus:
        yield ("defaults", "gpus_per_node"), f"{each}, but the nodes of the default queue have {node.gpus}"
    walltime, longest = site.defaults.get("walltime"), queue.walltime_s(1) if queue else None
    if walltime and longest and "walltime" not in wrong and parse_duration_s(walltime) > longest:
        yield ("defaults", "walltime"), f"{walltime}, but queue {named} has a limit of {format_duration(longest)}"
