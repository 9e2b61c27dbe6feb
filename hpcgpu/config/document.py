"""Render and read the run document as one JSON line that fits one argv word. It holds no secret.

Every leader reads it, and every rank its part for :mod:`hpcgpu.agent.rank`, so nothing is imported here but json:
a validator such as msgspec costs 10 to 30 ms of CPU.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any

from hpcgpu.config import read_value
from hpcgpu.errors import ConfigError
from hpcgpu.model.allocation import WRITTEN
from hpcgpu.model.document import VERSION, RunDocument
from hpcgpu.model.limit import Limit
from hpcgpu.model.settings import Settings, options

SHAPES = ("gang", "in-allocation", "head", "member")
# Linux refuses an argv word above 128 KiB (MAX_ARG_STRLEN, execve(2)).
LONGEST = 131_071


def render(document: RunDocument) -> str:
    """Render a run document, the settings that are not defaults, as one ASCII line; ConfigError if it is too long."""
    defaults = Settings()
    settings: dict[str, Any] = {}
    for option in options():
        value = getattr(document.settings, option.name)
        if value != getattr(defaults, option.name) or (option.name in WRITTEN and value is not None):
            settings[option.name] = _plain(value)
    whole = {
        "version": document.version,
        "shape": document.shape,
        "script": document.script,
        "folder": document.folder,
        "launch": document.launch,
        "exit_file": document.exit_file,
        "settings": settings,
        "sources": dict(document.settings.sources),
    }
    text = json.dumps(whole, sort_keys=True, separators=(",", ":"), allow_nan=False)
    text = text.replace("\x7f", "\\u007f")  # the only control character that json does not escape
    if len(text) > LONGEST:
        raise ConfigError(
            f"the run document has {len(text)} characters, and an argument of a program at most {LONGEST}: "
            "shorten env, job_script_prologue or the script's arguments (put them into a file)"
        )
    return text


def read(text: str) -> RunDocument:
    """Parse a run document: ``read(render(d)) == d``; raise ConfigError for other text, version or values."""
    try:
        raw = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"not a run document (it is made by hpcgpu, not by hand): {error}: {text[:80]!r}") from error
    if not isinstance(raw, dict) or "version" not in raw:
        raise ConfigError(f"not a run document (it is made by hpcgpu, not by hand): {text[:80]!r}")
    if type(raw["version"]) is not int or raw["version"] != VERSION:
        raise ConfigError(
            f"run document of version {raw['version']!r}, but this hpcgpu reads version {VERSION}: the hpcgpu that "
            "made it and the one on this node differ; install the same on both, or make the job script anew"
        )
    expected = {f.name for f in fields(RunDocument)} | {"sources"}
    if set(raw) != expected:
        raise ConfigError(f"run document with keys {sorted(raw)}; expected {sorted(expected)}")
    _check("shape", raw["shape"], raw["shape"] in SHAPES, f"one of {', '.join(SHAPES)}")
    _check("script", raw["script"], _are_texts(raw["script"]), "a list of texts")
    for name in ("folder", "launch", "exit_file"):
        _check(name, raw[name], isinstance(raw[name], str), "text")
    _check("settings", raw["settings"], isinstance(raw["settings"], dict), "an object")
    sources = raw["sources"]
    _check("sources", sources, isinstance(sources, dict) and _are_texts(list(sources.values())), "texts by name")
    settings = Settings(**_values(raw["settings"]), sources=MappingProxyType(sources))
    return RunDocument(settings, raw["shape"], tuple(raw["script"]), raw["folder"], raw["launch"], raw["exit_file"])


def _values(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Read the settings' values; refuse a value that reading would change (``"2"`` for ``2``)."""
    by_name = {option.name: option for option in options()}
    values: dict[str, Any] = {}
    for name, value in raw.items():
        _check("settings", name, name in by_name, "names of settings")
        values[name] = read_value(by_name[name], value, "the run document")
        _check(f"settings.{name}", value, _plain(values[name]) == value, "what hpcgpu writes")
    return values


def _plain(value: object) -> object:
    """Convert a setting's value to JSON's types."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Limit):
        return value.value
    return list(value) if isinstance(value, tuple) else value


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(entry, str) for entry in value)


def _check(path: str, value: object, right: bool, allowed: str) -> None:
    if not right:
        raise ConfigError(f"run document: {path}: {value!r}; allowed: {allowed}")
