"""Dask's configuration: the sections ``hpcgpu`` and dask-jobqueue's, memory limits, and what ranks inherit.

Importing dask costs 0.1 CPU s, which each rank of srun hpcgpu run would pay. It is not imported if the word stands in
no variable and no file that Dask would read (docs.dask.org, Configuration).
"""

from __future__ import annotations

import json
import os
import site as python_site
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpcgpu.host import log
from hpcgpu.model.settings import read_disk_limit, read_option, read_part

_MEMORY_SECTION = "distributed.worker.memory"
_MEMORY_OPTIONS: Mapping[str, Callable[[object], float]] = {
    **dict.fromkeys(("target", "spill", "pause", "terminate"), read_part),
    "max-spill": read_disk_limit,
}


def read_variables(environ: Mapping[str, str]) -> None:
    """Give this process Dask's variables of ``env=``: Dask is imported, and has read those that were there.

    Raises ConfigError for a wrong memory limit.
    """
    import dask.config

    dask.config.update(dask.config.config, dask.config.collect_env(dict(environ)), priority="new")
    check_dask_memory()


def check_dask_memory() -> None:
    """Check the memory limits of Dask's configuration; raise ConfigError for a wrong one."""
    import dask.config

    section = dask.config.get(_MEMORY_SECTION, None) or {}
    for name, read in _MEMORY_OPTIONS.items():
        read_option(f"{_MEMORY_SECTION}.{name}", section.get(name), "Dask's configuration", read)


def jobqueue_section(batch: str) -> tuple[str, Mapping[str, object]] | None:
    """Return dask-jobqueue's section for a batch system without its own defaults; say once which part is ignored."""
    if "dask" not in sys.modules and not _is_mentioned(("jobqueue",)):
        return None
    import dask.config

    from hpcgpu.config import migration

    path = f"jobqueue.{batch}"
    section = dask.config.get(path, None)
    if not isinstance(section, dict):
        return (path, section) if section else None
    for defaults in dask.config.defaults:
        section = migration.without(section, dask.config.get(path, {}, config=defaults) or {})
    ignored = "; ".join(migration.ignored(section))
    if ignored:
        log.say_once(f"dask config {path}: ignored are {ignored}")
    return path, section


def dask_section() -> Mapping[str, object]:
    """Return the section ``hpcgpu`` of the dask configuration."""
    if "dask" not in sys.modules and not _is_mentioned():
        return {}
    import dask.config

    section = dask.config.get("hpcgpu", {}) or {}
    jit = dask.config.get("jit-unspill", None)  # dask-cuda's name
    return section if jit is None or not isinstance(section, dict) else {"jit_unspill": jit, **section}


def dask_places(section: object) -> dict[str, str]:
    """Return the place of each value: a variable, or the last file that has it; no place for values of a script."""
    if not isinstance(section, dict) or not section:
        return {}
    import dask.config

    places: dict[str, str] = {}
    for path, config in dask.config.collect_yaml(dask.config.paths, return_paths=True):
        in_file = config.get("hpcgpu") if isinstance(config, dict) else None
        for name, value in in_file.items() if isinstance(in_file, dict) else ():
            if name in section and section[name] == value:
                places[name] = str(path)
    variables = {name: f"DASK_HPCGPU__{str(name).upper().replace('-', '_')}" for name in section}
    return places | {name: variable for name, variable in variables.items() if variable in os.environ}


def scheduler_address() -> str:
    """Return ``scheduler-address`` of Dask's configuration, which ``dask worker`` takes, too; "" if it is not set."""
    import dask.config

    return str(dask.config.get("scheduler-address", None) or "")


def dask_environ() -> dict[str, str]:
    """Return the variable that gives ranks here what dask.config.set has set; LocalCluster's nannies set it, too."""
    import dask.config

    return {"DASK_INTERNAL_INHERIT_CONFIG": dask.config.serialize(_as_json(dask.config.global_config))}


def _as_json(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return a section without values that JSON cannot hold, such as functions."""
    out: dict[str, Any] = {}
    for key, value in section.items():
        if isinstance(value, Mapping):
            out[key] = _as_json(value)
            continue
        with suppress(TypeError, ValueError):
            json.dumps(value)
            out[key] = value
    return out


def _is_mentioned(names: tuple[str, ...] = ("hpcgpu", "jit-unspill")) -> bool:
    variables = ("DASK_INTERNAL_INHERIT_CONFIG", *(f"DASK_{name.upper()}" for name in names))
    if any(name.startswith(variables) for name in os.environ):
        return True
    users = os.environ.get("DASK_CONFIG", "~/.config/dask")
    homes = [os.environ.get("DASK_ROOT_CONFIG", "/etc/dask"), "~/.config/dask", users]
    homes += [f"{prefix}/etc/dask" for prefix in {sys.prefix, *python_site.PREFIXES}]
    for home in [Path(p) for h in homes if os.access(p := os.path.expanduser(h), os.R_OK)]:  # noqa: PTH111 - as dask
        files = [home] if home.is_file() else [*home.glob("*.y*ml"), *home.glob("*.json")]
        if any(name in path.read_text(errors="replace") for path in files for name in names):
            return True
    return False
