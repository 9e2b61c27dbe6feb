"""The run document: all settings as one line of JSON, which fits one variable of the environment."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any

from hpcgpu.config.values import read_value
from hpcgpu.errors import ConfigError, opt
from hpcgpu.model.allocation import DOCUMENT, WRITTEN
from hpcgpu.model.run_document import VERSION, RunDocument
from hpcgpu.model.settings import Limit, Settings, options

SHAPES = ("gang", "in-allocation", "head", "member")
# Linux refuses a variable above 128 KiB, with its name (MAX_ARG_STRLEN, execve(2)).
LONGEST = 131_071 - len(f"{DOCUMENT}=")


def render_document(document: RunDocument) -> str:
    """Render a run document, the settings that are not defaults, as one ASCII line; ConfigError if it is too long."""
    defaults = Settings()
    settings: dict[str, Any] = {}
    for option in options():
        value = getattr(document.settings, option.name)
        if value != getattr(defaults, option.name) or (option.name in WRITTEN and value is not None):
            settings[option.name] = _plain(value)
    whole = {
        **{f.name: getattr(document, f.name) for f in fields(RunDocument)},
        "settings": settings,
        "sources": dict(document.settings.sources),
    }
    text = json.dumps(whole, sort_keys=True, separators=(",", ":"), allow_nan=False)
    text = text.replace("\x7f", "\\u007f")  # the only control character that json does not escape
    if len(text) > LONGEST:
        raise ConfigError(
            f"the run document has {len(text)} characters, and a variable of the environment at most {LONGEST}: "
            f"shorten {opt('env', None)}, {opt('job_script_prologue', None)} or the script's arguments "
            "(put them into a file)"
        )
    return text


def read_document(text: str) -> RunDocument:
    """Parse a run document: the inverse of :func:`render_document`; ConfigError for other text, version or values."""
    try:
        raw = json.loads(text)
        version = raw["version"]
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"not a run document (it is made by hpcgpu, not by hand): {error}: {text[:80]!r}") from error
    if type(version) is not int or version != VERSION:
        raise ConfigError(
            f"run document of version {version!r}, but this hpcgpu reads version {VERSION}: the hpcgpu that "
            "made it and the one on this node differ; install the same on both, or make the job script anew"
        )
    expected = {f.name for f in fields(RunDocument)} | {"sources"}
    if set(raw) != expected:
        raise ConfigError(f"run document with keys {sorted(raw)}; expected {sorted(expected)}")
    _check("shape", raw["shape"], raw["shape"] in SHAPES, f"one of {', '.join(SHAPES)}")
    for name, value in raw.items():
        kind = {"version": int, "script": list, "settings": dict, "sources": dict}.get(name, str)
        _check(name, value, isinstance(value, kind), f"a {kind.__name__}")
    sources, script = raw["sources"], raw["script"]
    for name, texts in (("sources", sources.values()), ("script", script)):
        _check(name, raw[name], all(isinstance(text, str) for text in texts), "texts")
    by_name = {option.name: option for option in options()}
    values: dict[str, Any] = {}
    for name, value in raw["settings"].items():
        _check("settings", name, name in by_name, "names of settings")
        text = f"{value}s" if by_name[name].metadata["kind"] == "duration" else value
        values[name] = read_value(by_name[name], text, "the run document")
        _check(f"settings.{name}", value, _plain(values[name]) == value, "what hpcgpu writes")  # not "2" for 2
    settings = Settings(**values, sources=MappingProxyType(sources))
    return RunDocument(settings, raw["shape"], tuple(script), raw["folder"], raw["launch"], raw["exit_file"])


def _plain(value: object) -> object:
    """Convert a setting's value to JSON's types."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Limit):
        return value.value
    return list(value) if isinstance(value, tuple) else value


def _check(path: str, value: object, right: bool, allowed: str) -> None:
    if not right:
        raise ConfigError(f"run document: {path}: {value!r}; allowed: {allowed}")
