"""Render the schema of site files from the classes: as JSON Schema for editors, as a page for people."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from inspect import cleandoc
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from hpcgpu.model.settings import options, user_name
from hpcgpu.model.site import DIALECTS, Site

_DRAFT = "https://json-schema.org/draft/2020-12/schema"


def json_schema() -> str:
    """Return the JSON Schema (draft 2020-12) of site files: keys, types, texts; not how values go together."""
    (_, *_), parts = msgspec.json.schema_components((Site, *DIALECTS.values()), ref_template="#/$defs/{name}")
    kinds = {kind.__name__: kind for kind, _ in _kinds(Site)} | {kind.__name__: kind for kind in DIALECTS.values()}
    for name, part in parts.items():
        _complete(part, kinds[name])
    site = parts.pop("Site")
    site["properties"]["dialect"] = {"type": "object", "description": _text(Site, "dialect")}
    site["properties"]["defaults"] = _settings()
    properties = {batch: {"dialect": {"$ref": f"#/$defs/{kind.__name__}"}} for batch, kind in DIALECTS.items()}
    conditions = {batch: {"properties": {"batch": {"const": batch}}} for batch in DIALECTS}
    rules = [{"if": conditions[batch], "then": {"properties": properties[batch]}} for batch in DIALECTS]
    site["required"] = ["version", *site["required"]]
    whole = {"$schema": _DRAFT, **site, "title": "hpcgpu site file", "allOf": rules, "$defs": parts}
    return json.dumps(whole, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


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


def _complete(part: dict[str, Any], kind: type) -> None:
    """Add what msgspec omits: texts of fields, and that other keys are errors."""
    part["additionalProperties"] = False
    part["description"] = cleandoc(kind.__doc__ or "")
    part["properties"] = {name: part["properties"][name] for name in hints(kind)}
    for name, shape in part["properties"].items():
        shape["description"] = _text(kind, name)
        if shape.get("default", "") in (None, "", [], {}) or isinstance(shape.get("default"), dict):
            shape.pop("default", None)


def _settings() -> dict[str, Any]:
    keys = {user_name(f): {"description": f.metadata["text"]} for f in options() if user_name(f) != "site"}
    keys["source"] = {"description": _text(DIALECTS["slurm"], "source")}
    shape = {"type": "object", "properties": keys, "additionalProperties": False}
    return {**shape, "description": _text(Site, "defaults")}


def _text(kind: type, name: str) -> str:
    return str(next(f for f in fields(kind) if f.name == name).metadata["text"])


def _kinds(kind: type, path: str = "") -> Iterator[tuple[type, str]]:
    """Yield a block's class and those of the blocks in it, each with its path in a file."""
    yield kind, path
    for name, hint in hints(kind).items():
        for inner, more in _inner(hint):
            yield from _kinds(inner, f"{path}{'.' if path else ''}{name}{more}")


def _inner(hint: Any) -> Iterator[tuple[type, str]]:  # a type
    if isinstance(hint, type) and is_dataclass(hint):
        yield hint, ""
    elif get_origin(hint) in (Union, UnionType):
        yield from (pair for part in get_args(hint) for pair in _inner(part))
    elif get_origin(hint) is tuple:
        yield from ((kind, "[]") for kind, _ in _inner(get_args(hint)[0]))
    elif len(get_args(hint)) == 2:
        yield from ((kind, ".NAME") for kind, _ in _inner(get_args(hint)[1]))


def reference() -> str:
    """Return the page of all keys, in Markdown."""
    out = [
        "# Site files, key by key",
        "",
        "Made by `pytest --update-golden tests/unit/config/test_sites.py`; [a schema](site.schema.json) for editors:",
        "`# yaml-language-server: $schema=.../docs/reference/site.schema.json` at the top of a file.",
        "How to write one: [site_configs/README.md](../../site_configs/README.md).",
        "",
        "Most blocks also take `source`, a tag or a list of tags of `sources`: where the block was read; and `text`,",
        "for people. Values are text unless the key says otherwise. **Bold** keys must be given.",
    ]
    dialects = [(kind, f"dialect` with `batch: {batch}") for batch, kind in DIALECTS.items()]
    for kind, path in (*_kinds(Site), *dialects):
        text = cleandoc(kind.__doc__ or "").partition("\n")[0]  # most say what the key above says
        out += ["", f"## {f'`{path}`' if path else 'The file'}", "", *((text, "") if len(text) > 60 else ())]
        out += [_row(f, hints(kind)[f.name]) for f in fields(kind) if f.name in hints(kind) and not _is_common(f)]
    return "\n".join(out) + "\n"


def _is_common(f: Field[Any]) -> bool:
    """Return whether a key is one of those that most blocks have, without a meaning of its own."""
    return f.name == "source" or (f.name == "text" and str(f.metadata["text"]).startswith("more words"))


def _row(f: Field[Any], hint: Any) -> str:
    needed = f.default is MISSING and f.default_factory is MISSING
    key = f"**`{f.name}`**" if needed else f"`{f.name}`"
    kind = "" if (shown := format_type(hint)) == "text" else f" ({shown})"
    return f"- {key}{kind}: {f.metadata['text']}"
