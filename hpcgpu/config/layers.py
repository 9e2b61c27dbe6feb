"""Merge five layers of configuration into one :class:`~hpcgpu.model.Settings` that records each value's source.

The first layer with a value wins: keywords or flags, environment (``HPCGPU_<NAME>``), dask configuration (``hpcgpu:``),
its section for dask-jobqueue where a job is submitted, the site file, the default.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import Field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from hpcgpu.config.directives import option_of
from hpcgpu.config.migration import HINTS
from hpcgpu.config.validation import check_settings
from hpcgpu.config.values import nearest, read_value
from hpcgpu.errors import ConfigError
from hpcgpu.model.settings import Settings, options, user_name
from hpcgpu.model.simulated import parse_simulated

if TYPE_CHECKING:
    from hpcgpu.model.site import Site  # 20 dataclasses: 10 CPU ms, which each command and rank would pay

PREFIX = "HPCGPU_"
BY_NAME: Mapping[str, Field[Any]] = MappingProxyType(
    {name: f for f in options() for name in (user_name(f), *f.metadata["aliases"])}
)
Layer = Mapping[str, tuple[Any, str]]  # option's name as users type it -> value, where it was set

# Given as a keyword, None means "no limit" to Dask and dask-cuda; for all other options None means "not given".
_NONE_IS_OFF = ("device_memory_limit", "memory_limit")
_JIT = "DASK_JIT_UNSPILL"  # dask-cuda's variable, until 26.04


def read_settings(
    given: Mapping[str, object],
    *,
    site: Site | None = None,
    dask_config: Mapping[str, object] = MappingProxyType({}),
    environ: Mapping[str, str] = MappingProxyType({}),
    given_from: str = "keyword {name}",
    jobqueue: tuple[str, Mapping[str, object]] | None = None,
    asks: bool = False,
    dask_places: Mapping[str, str] = MappingProxyType({}),
) -> Settings:
    """Read settings from all layers, and check them one by one and together.

    Raises ConfigError for an unknown name, an invalid value, or values that contradict each other. ``given``: by user
    name or dask-jobqueue's name. ``asks``: a job is requested, so its CPUs and memory follow from the site's nodes.
    ``jobqueue``: the section's name, and its values beyond the defaults. ``dask_config``: the section ``hpcgpu``, with
    hyphens or underscores. ``dask_places``: the file or variable of its names. ``given_from`` formats the source of a
    given value: ``"option --{flag}"``.
    """
    layers = [
        read_given(_none_is_off(given), lambda name: given_from.format(name=name, flag=name.replace("_", "-"))),
        read_given(_from_environment(environ), lambda name: PREFIX + name.upper()),
        read_given({"jit_unspill": environ.get(_JIT) or None}, lambda _: _JIT),
        _from_dask(_section(dask_config), dask_places),
    ]
    found = _by_nodes({name: given for layer in reversed(layers) for name, given in layer.items()}, site)
    if "gpus" not in layers[0]:
        found = _fewer_simulated(found)
    if jobqueue is not None:
        found = _from_jobqueue(*jobqueue, found, site) | found
    found = _without_mpi(_over_site(found, site, environ, asks=asks) if site else found)
    settings = Settings(
        **{BY_NAME[name].name: value for name, (value, _) in found.items()},
        sources=MappingProxyType({name: where for name, (_, where) in found.items()}),
    )
    check_settings(settings, site)
    return settings


def _by_nodes(found: dict[str, tuple[Any, str]], site: Site | None) -> dict[str, tuple[Any, str]]:
    """Replace a number of all GPUs, ``gpus=8``, by nodes and the GPUs of each."""
    if not found.get("gpus", ("",))[0].isdecimal():
        return found
    from hpcgpu.config.sites.follow import nodes_for

    return nodes_for(found, site)


def _fewer_simulated(found: dict[str, tuple[Any, str]]) -> dict[str, tuple[Any, str]]:
    """Return the values with the simulated GPUs that a script takes of the machine that HPCGPU_GPUS simulates."""
    (gpus, where), (count, _) = found.get("gpus", ("", "")), found.get("gpus_per_node", (None, ""))
    if not count or not gpus.startswith("sim") or count >= parse_simulated(gpus).per_node:
        return found
    return found | {"gpus": (re.sub(r"\d+", str(count), gpus, count=1), f"{where} and gpus_per_node")}


def _without_mpi(found: dict[str, tuple[Any, str]]) -> dict[str, tuple[Any, str]]:
    """Let ranks that will use UCX meet by files, unless the user chose otherwise.

    Open MPI loads a UCX of its own under the same name (``libucp.so.0``), and the other one does not work then (libucx
    1.21.0 after Open MPI 5.0.11: connections are never made).
    """
    value, where = found.get("protocol", ("", ""))
    return {"rendezvous": ("file", where), **found} if value == "ucx" else found


def _none_is_off(given: Mapping[str, object]) -> Mapping[str, object]:
    return {name: "off" if value is None and name in _NONE_IS_OFF else value for name, value in given.items()}


def chosen_site(
    given: Mapping[str, object],
    *,
    dask_config: Mapping[str, object] = MappingProxyType({}),
    environ: Mapping[str, str] = MappingProxyType({}),
) -> str | None:
    """Return the name or path of the requested site file, by the same precedence; None if none is requested."""
    sources = {
        "keyword site": given.get("site"),
        PREFIX + "SITE": environ.get(PREFIX + "SITE") or None,
        "dask config hpcgpu.site": _section(dask_config).get("site"),
    }
    for where, value in sources.items():
        if value is not None:
            return str(read_value(BY_NAME["site"], value, where))
    return None


def read_given(given: Mapping[str, object], where: Callable[[str], str]) -> Layer:
    """Read one layer's values under the options' user names; ``where`` maps a name as typed to its source.

    None means not given. Raises ConfigError for a name that is unknown or another package's, an option under two names,
    or an invalid value.
    """
    found: dict[str, tuple[Any, str]] = {}
    for name, value in given.items():
        if value is None:
            continue
        option = BY_NAME.get(name)
        if option is None:
            _refuse(name, value, where(name))
            continue
        own = user_name(option)
        if own in found:
            raise ConfigError(f"{own} is given twice: by {found[own][1]} and by {where(name)}; say it once")
        found[own] = (read_value(option, value, where(name)), where(name))
    return found


def _over_site(said: Layer, site: Site, environ: Mapping[str, str], *, asks: bool) -> dict[str, tuple[Any, str]]:
    """Put the user's values above the site's; a list of the site stays in front of the user's list.

    A site file lists what its jobs need (``-l filesystems=home``): a user's additional directive must not replace all
    of them. It replaces the site's directive for the same option.
    """
    from hpcgpu.config.sites.follow import follow

    given = follow(site, said, environ, asks=asks)
    defaults = read_given({name: value for name, (value, _) in given.items()}, lambda name: given[name][1])
    found = {**defaults, **said}
    for name in said.keys() & defaults.keys():
        kind = BY_NAME[name].metadata["kind"]
        if kind in ("texts", "lines"):
            (own, where), (theirs, their_source) = said[name], defaults[name]
            same = option_of if kind == "texts" else str
            said_again = {same(entry) for entry in own}
            kept = tuple(entry for entry in theirs if same(entry) not in said_again)
            found[name] = ((*kept, *own), f"{where} and {their_source}" if kept else where)
    return found


def _from_jobqueue(
    path: str, section: Mapping[str, object], said: Layer, site: Site | None
) -> dict[str, tuple[Any, str]]:
    """Read dask-jobqueue's section; its cores are divided among the requested GPUs."""
    from hpcgpu.config.jobqueue import translate

    node = site.node(said.get("queue", (None, ""))[0]) if site else None
    count = said.get("gpus_per_node", (node.gpus if node else None, ""))[0]
    if "gpus" in said:
        count = parse_simulated(said["gpus"][0]).per_node
    given, keys = translate(_section(section, path), count)
    return dict(read_given(given, lambda name: f"dask config {path}.{keys[name]}"))


def _refuse(name: str, value: object, where: str) -> None:
    """Raise for another package's or an unknown option, unless its value asks for the default behaviour."""
    hint = HINTS.get(name)
    if hint is None:
        raise ConfigError(f"unknown option {name!r}, set by {where}: {nearest(name, BY_NAME)}")
    if not hint.is_harmless(value):
        raise ConfigError(f"{name}={value!r}, set by {where}: {hint.instead}")


def _from_environment(environ: Mapping[str, str]) -> dict[str, object]:
    """Return the options in the environment; an empty value is unset.

    A site's module for this package may set names that are no options (HPCGPU_ROOT, HPCGPU_VERSION). So an unknown name
    is an error only if it looks like a typing error.
    """
    from difflib import get_close_matches

    names = {PREFIX + name.upper(): name for name in (*BY_NAME, *HINTS)}
    found: dict[str, object] = {}
    for variable, value in environ.items():
        if not variable.startswith(PREFIX) or not value:
            continue
        if variable in names:
            found[names[variable]] = value
        elif close := get_close_matches(variable, names, n=1, cutoff=0.88):
            raise ConfigError(f"{variable} is set in the environment, but is no option: did you mean {close[0]}?")
    return found


def _section(found: object, path: str = "hpcgpu") -> Mapping[str, object]:
    if not isinstance(found, Mapping) or not all(isinstance(name, str) for name in found):
        raise ConfigError(f"dask config {path} is {found!r}; allowed: options by name, such as {path}: {{queue: gpu}}")
    return found


def _from_dask(section: Mapping[str, object], places: Mapping[str, str]) -> Layer:
    typed = {name.replace("-", "_"): name for name in section}
    if len(typed) < len(section):
        raise ConfigError(f"dask config hpcgpu has one name with hyphens and with underscores: {', '.join(section)}")
    given = {name: section[original] for name, original in typed.items()}

    def where(name: str) -> str:
        return ", ".join(filter(None, (f"dask config hpcgpu.{typed[name]}", places.get(typed[name]))))

    return read_given(given, where)
