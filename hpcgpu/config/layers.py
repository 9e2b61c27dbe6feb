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

from hpcgpu.config import nearest, option_of, read_value
from hpcgpu.config.document import check_settings
from hpcgpu.config.migration import HINTS
from hpcgpu.errors import ConfigError
from hpcgpu.model.allocation import parse_simulated
from hpcgpu.model.settings import Settings, options, user_name

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
    keywords: Mapping[str, object],
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
        read_layer(
            {name: "off" if value is None and name in _NONE_IS_OFF else value for name, value in keywords.items()},
            lambda name: given_from.format(name=name, flag=name.replace("_", "-")),
        ),
        read_layer(_from_environment(environ), lambda name: PREFIX + name.upper()),
        read_layer({"jit_unspill": environ.get(_JIT) or None}, lambda _: _JIT),
        _from_dask(_section(dask_config), dask_places),
    ]
    values = {name: value for layer in reversed(layers) for name, value in layer.items()}
    if values.get("gpus", ("",))[0].isdecimal():
        from hpcgpu.config.sites import nodes_for

        values = nodes_for(values, site)
    if "gpus" not in layers[0]:
        values = _fewer_simulated(values)
    if jobqueue is not None:
        values = _from_jobqueue(*jobqueue, values, site) | values
    if site:
        values = _over_site(values, site, environ, asks=asks)
    if values.get("protocol", ("",))[0] == "ucx":
        # Unless the user chose otherwise, the ranks meet by files: Open MPI loads a UCX of its own under the same name
        # (libucp.so.0), and the other UCX does not work then (libucx 1.21.0 after Open MPI 5.0.11: it never connects).
        values = {"rendezvous": ("file", values["protocol"][1]), **values}
    settings = Settings(
        **{BY_NAME[name].name: value for name, (value, _) in values.items()},
        sources=MappingProxyType({name: where for name, (_, where) in values.items()}),
    )
    check_settings(settings, site)
    return settings


def _fewer_simulated(values: dict[str, tuple[Any, str]]) -> dict[str, tuple[Any, str]]:
    """Return the values with the simulated GPUs that a script takes of the machine that HPCGPU_GPUS simulates."""
    (gpus, where), (count, _) = values.get("gpus", ("", "")), values.get("gpus_per_node", (None, ""))
    if not count or not gpus.startswith("sim") or count >= parse_simulated(gpus).per_node:
        return values
    return values | {"gpus": (re.sub(r"\d+", str(count), gpus, count=1), f"{where} and gpus_per_node")}


def chosen_site(
    keywords: Mapping[str, object],
    *,
    dask_config: Mapping[str, object] = MappingProxyType({}),
    environ: Mapping[str, str] = MappingProxyType({}),
) -> str | None:
    """Return the name or path of the requested site file, by the same precedence; None if none is requested."""
    sources = {
        "keyword site": keywords.get("site"),
        PREFIX + "SITE": environ.get(PREFIX + "SITE") or None,
        "dask config hpcgpu.site": _section(dask_config).get("site"),
    }
    for where, value in sources.items():
        if value is not None:
            return str(read_value(BY_NAME["site"], value, where))
    return None


def read_layer(entries: Mapping[str, object], where: Callable[[str], str]) -> Layer:
    """Read a layer under user names; ConfigError for an unknown, repeated or foreign name, or an invalid value."""
    # where maps a name as typed to its source. None means not given.
    values: dict[str, tuple[Any, str]] = {}
    for name, value in entries.items():
        if value is None:
            continue
        option = BY_NAME.get(name)
        if option is None:
            if (hint := HINTS.get(name)) is None:
                raise ConfigError(f"unknown option {name!r}, set by {where(name)}: {nearest(name, BY_NAME)}")
            if not hint.is_harmless(value):  # it asks for more than the default behaviour
                raise ConfigError(f"{name}={value!r}, set by {where(name)}: {hint.instead}")
            continue
        if (key := user_name(option)) in values:
            raise ConfigError(f"{key} is given twice: by {values[key][1]} and by {where(name)}; give it once")
        values[key] = (read_value(option, value, where(name)), where(name))
    return _simulate(values) if "simulate" in values else values


def _simulate(values: dict[str, tuple[Any, str]]) -> Layer:
    """Replace ``simulate="4x256MiB"`` by ``gpus="sim:4x256MiB"``, and a total beside it, ``gpus=8``, by ``nodes``."""
    text, where = values.pop("simulate")
    simulated = parse_simulated(text, "")
    each, (gpus, place) = simulated.per_node, values.get("gpus", (f"sim:{text}", where))
    nodes = values.get("nodes")
    if gpus.isdecimal():
        values["nodes"] = nodes or (int(gpus) // each, place)
        fits = int(gpus) == each * values["nodes"][0]
    else:
        fits = parse_simulated(gpus) == simulated
    if not fits:
        beside = f" on nodes={nodes[0]}" if nodes else ""
        raise ConfigError(
            f"gpus={gpus!r} (set by {place}){beside} contradicts simulate={text!r} (set by {where}), {each} GPUs on "
            f"each node; allowed: gpus= as the total, {each} times the number of nodes; or leave gpus out"
        )
    return {**values, "gpus": (f"sim:{text}", where)}


def _over_site(users: Layer, site: Site, environ: Mapping[str, str], *, asks: bool) -> dict[str, tuple[Any, str]]:
    """Put the user's values above the site's; a list of the site stays in front of the user's list."""
    # A site file lists what its jobs need (-l filesystems=home): a user's additional directive must not replace all of
    # them. It replaces the site's directive for the same option.
    from hpcgpu.config.sites import follow

    sites = follow(site, users, environ, asks=asks)
    defaults = read_layer({name: value for name, (value, _) in sites.items()}, lambda name: sites[name][1])
    values = {**defaults, **users}
    for name in users.keys() & defaults.keys():
        kind = BY_NAME[name].metadata["kind"]
        if kind in ("texts", "lines"):
            (users_list, where), (sites_list, sites_source) = users[name], defaults[name]
            same = option_of if kind == "texts" else str
            repeated = {same(entry) for entry in users_list}
            kept = tuple(entry for entry in sites_list if same(entry) not in repeated)
            values[name] = ((*kept, *users_list), f"{where} and {sites_source}" if kept else where)
    return values


def _from_jobqueue(
    path: str, section: Mapping[str, object], values: Layer, site: Site | None
) -> dict[str, tuple[Any, str]]:
    """Read dask-jobqueue's section; its cores are divided among the requested GPUs."""
    from hpcgpu.config.migration import translate

    node = site.node(values.get("queue", (None, ""))[0]) if site else None
    count = values.get("gpus_per_node", (node.gpus if node else None, ""))[0]
    if "gpus" in values:
        count = parse_simulated(values["gpus"][0]).per_node
    translated, keys = translate(_section(section, path), count)
    return dict(read_layer(translated, lambda name: f"dask config {path}.{keys[name]}"))


def _from_environment(environ: Mapping[str, str]) -> dict[str, object]:
    """Return the options in the environment; an empty value is unset."""
    # A site's module for this package may set names that are no options (HPCGPU_ROOT, HPCGPU_VERSION). So an unknown
    # name is an error only if it looks like a typing error.
    from difflib import get_close_matches

    names = {PREFIX + name.upper(): name for name in (*BY_NAME, *HINTS)}
    values: dict[str, object] = {}
    for variable, value in environ.items():
        if not variable.startswith(PREFIX) or not value:
            continue
        if variable in names:
            values[names[variable]] = value
        elif close := get_close_matches(variable, names, n=1, cutoff=0.88):
            raise ConfigError(f"{variable} is set in the environment, but is no option: did you mean {close[0]}?")
    return values


def _section(section: object, path: str = "hpcgpu") -> Mapping[str, object]:
    if not isinstance(section, Mapping) or not all(isinstance(name, str) for name in section):
        raise ConfigError(
            f"dask config {path} is {section!r}; allowed: options by name, such as {path}: {{queue: gpu}}"
        )
    return section


def _from_dask(section: Mapping[str, object], places: Mapping[str, str]) -> Layer:
    typed = {name.replace("-", "_"): name for name in section}
    if len(typed) < len(section):
        raise ConfigError(f"dask config hpcgpu has one name with hyphens and with underscores: {', '.join(section)}")
    values = {name: section[original] for name, original in typed.items()}

    def where(name: str) -> str:
        return ", ".join(filter(None, (f"dask config hpcgpu.{typed[name]}", places.get(typed[name]))))

    return read_layer(values, where)
