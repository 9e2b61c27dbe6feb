"""Translate the sections ``jobqueue.slurm`` and ``jobqueue.pbs`` of Dask's configuration into our settings.

These sections are dask-jobqueue's (0.9), whose jobs have one node: here ``memory`` is that of each node, and ``cores``,
the cores of a job, are divided among the node's GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from hpcgpu.config.migration import HINTS
from hpcgpu.errors import ConfigError
from hpcgpu.model.limit import plain_number

# Our options and dask-jobqueue's keys, the newer key before the older ones that it replaces.
_KEYS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "job_name": ("name",),
        "queue": ("queue",),
        "account": ("account", "project"),
        "walltime": ("walltime",),
        "memory": ("memory",),
        "interface": ("interface",),
        "python": ("python",),
        "log_directory": ("log-directory",),
        "local_directory": ("local-directory",),
        "death_timeout": ("death-timeout",),
        "job_extra_directives": ("job-extra-directives", "job-extra"),
        "job_directives_skip": ("job-directives-skip", "header-skip"),
        "job_script_prologue": ("job-script-prologue", "env-extra"),
    }
)
_CORES = ("job-cpu", "cores")
# Values that need no warning: they ask for the default behaviour, or have no effect.
_HARMLESS: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "worker-command": ("distributed.cli.dask_worker", "hpcgpu.worker"),
        "shebang": ("#!/usr/bin/env bash", "#!/bin/bash"),
    }
)
# Workers have their folders there even if it is not set.
_OWN_FOLDERS = ("$TMPDIR", "${TMPDIR}")
_ONLY_OPTIONS = "only whole options such as '--mem' can be left out"
_WHY: Mapping[str, str] = MappingProxyType(
    {"python": "here it is one program", "job-directives-skip": _ONLY_OPTIONS, "header-skip": _ONLY_OPTIONS}
)
_NOTHING: tuple[object, ...] = (None, "", 0, [], {}, ())


def translate(section: Mapping[str, object], gpus_per_node: int | None) -> tuple[dict[str, object], dict[str, str]]:
    """Translate a section to our options' values, and the key of each; raise ConfigError for a bad number of cores."""
    # null, 0 and empty values are left out, and cores too if gpus_per_node, which divides them, is unknown.
    entries = _set_entries(section)
    values: dict[str, object] = {}
    keys: dict[str, str] = {}
    for name, theirs in _KEYS.items():
        if key := next((k for k in theirs if k in entries), None):
            value = _taken(key, entries[key])
            if value not in _NOTHING:
                values[name], keys[name] = value, key
    if gpus_per_node and (key := next((k for k in _CORES if k in entries), None)):
        count = plain_number(entries[key])
        if count is None or count < 1:
            raise ConfigError(f"cores of a job: {entries[key]!r} is no count; allowed: a whole number from 1")
        values["cores_per_gpu"], keys["cores_per_gpu"] = max(int(count) // gpus_per_node, 1), key
    return values, keys


def ignored(section: Mapping[str, object]) -> tuple[str, ...]:
    """Return the parts of a section that have no effect here, each with what to write instead."""
    entries = _set_entries(section)
    translated = {key for keys in _KEYS.values() for key in keys} | set(_CORES)
    out = []
    for key, value in entries.items():
        if key not in translated:
            hint = HINTS.get(key.replace("-", "_"))
            if value not in _HARMLESS.get(key, ()):
                out.append(f"{key} ({hint.instead if hint else 'no option of hpcgpu'})")
        elif _taken(key, value) != value and value not in _OWN_FOLDERS:
            out.append(f"{key}: {value!r} ({_WHY[key]})")
    return tuple(out)


def without(section: Mapping[str, object], defaults: Mapping[str, object]) -> dict[str, object]:
    """Return a section without the defaults that ``import dask_jobqueue`` adds to Dask's configuration."""
    canonical = {_canonical(key): value for key, value in defaults.items()}
    return {k: v for k, v in section.items() if _canonical(k) not in canonical or v != canonical[_canonical(k)]}


def _set_entries(section: Mapping[str, object]) -> dict[str, object]:
    return {_canonical(key): value for key, value in section.items() if value not in _NOTHING}


def _canonical(key: str) -> str:
    return key.replace("_", "-")


def _taken(key: str, value: object) -> object:
    """Return the part of a value that has an effect here."""
    if key == "python" and isinstance(value, str) and len(value.split()) > 1:
        return None  # dask-jobqueue pastes it: "apptainer exec image python"
    if key == "local-directory" and value in _OWN_FOLDERS:
        return None
    if key in ("job-directives-skip", "header-skip") and isinstance(value, (list, tuple)):
        # dask-jobqueue leaves out every line that contains the text
        return [text for text in value if str(text).startswith("-")]
    return value
