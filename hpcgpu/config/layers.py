"""Merge five layers of configuration into one :class:`~hpcgpu.model.Settings` that records each value's source.

The first layer with a value wins: keywords or flags, environment (``HPCGPU_<NAME>``), dask configuration (``hpcgpu:``),
its section for dask-jobqueue where a job is submitted, the site file, the default.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from hpcgpu.config.checks import check_settings
from hpcgpu.config.entry_points import LOCAL
from hpcgpu.config.migration import HINTS
from hpcgpu.config.values import Layer, nearest, option_of, read_value
from hpcgpu.errors import ConfigError, marked, opt
from hpcgpu.model.allocation import parse_simulated
from hpcgpu.model.settings import BY_NAME, Settings, user_name

if TYPE_CHECKING:
    from hpcgpu.model.site import Site  # 20 dataclasses: 10 CPU ms, which each command and rank would pay


PREFIX = "HPCGPU_"
# Given as a keyword, None means "no limit" to Dask and dask-cuda; for all other options None means "not given".
_NONE_IS_OFF = ("device_memory_limit", "memory_limit")
_JIT = "DASK_JIT_UNSPILL"  # dask-cuda's variable, until 26.04


def read_settings(
    keywords: Mapping[str, object],
    *,
    site: Site | None = None,
    dask_config: Mapping[str, object] = MappingProxyType({}),  # section hpcgpu, with hyphens or underscores
    environ: Mapping[str, str] = MappingProxyType({}),
    given_from: str = "keyword {name}",  # where a keyword was set; or "option --{flag}"
    jobqueue: tuple[str, Mapping[str, object]] | None = None,  # the section's name, and its values beyond the defaults
    asks: bool = False,  # a job is requested: its CPUs and memory follow from the site's nodes
    dask_places: Mapping[str, str] = MappingProxyType({}),  # the file or variable of names of dask_config
) -> Settings:
    """Read settings from all layers; ConfigError for unknown names, invalid values, or contradictions."""
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
        from hpcgpu.config.sites.rules import nodes_for

        values = nodes_for(values, site)
    (gpus, where), (count, _) = values.get("gpus", ("", "")), values.get("gpus_per_node", (None, ""))
    if "gpus" not in layers[0] and count and gpus.startswith("sim") and count < parse_simulated(gpus).per_node:
        # a script takes some of the GPUs of the machine that HPCGPU_GPUS simulates
        values["gpus"] = (re.sub(r"\d+", str(count), gpus, count=1), f"{where} and gpus_per_node")
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


def chosen_site(
    keywords: Mapping[str, object],
    *,
    dask_config: Mapping[str, object] = MappingProxyType({}),
    environ: Mapping[str, str] = MappingProxyType({}),
) -> str | None:
    """Return the name or path of the requested site file, by the same precedence; None if none is requested."""
    variable = f"{PREFIX}SITE"
    section, environ = {"site": _section(dask_config).get("site")}, {variable: environ.get(variable, "")}
    return read_settings({"site": keywords.get("site")}, dask_config=section, environ=environ).site


def read_layer(entries: Mapping[str, object], where: Callable[[str], str]) -> Layer:
    """Read a layer under user names; ConfigError for all unknown, repeated or foreign names, and invalid values.

    ``where`` maps a name as typed to its source. A value None means not given.
    """
    values: dict[str, tuple[Any, str]] = {}
    errors: list[ConfigError] = []
    for name, value in entries.items():
        try:
            if value is not None:
                _read_entry(values, name, value, where(name))
        except ConfigError as error:
            errors.append(error)
    if errors:
        raise errors[0] if len(errors) == 1 else ConfigError("\n".join(map(marked, errors)))
    return _simulate(values) if "simulate" in values else values


def _read_entry(values: dict[str, tuple[Any, str]], name: str, value: object, where: str) -> None:
    option = BY_NAME.get(name)
    if option is None:
        if (hint := HINTS.get(name)) is None:
            # these are translated before
            accepted = ("n_workers", "CUDA_VISIBLE_DEVICES") if where.endswith(f" of {LOCAL}") else ()
            raise ConfigError(f"unknown option {name!r}, set by {where}: {nearest(name, (*BY_NAME, *accepted))}")
        if not hint.is_harmless(value):  # it asks for more than the default behaviour
            raise ConfigError(f"{opt(name, value)}, set by {opt(where, None)}: {hint.instead}")
        return
    key, entry = user_name(option), (read_value(option, value, where), where)
    if key in values and values[key][0] != entry[0]:
        first, second = opt(values[key][1], None), opt(where, None)
        raise ConfigError(f"{opt(key, None)} is given twice: by {first} and by {second}; give it once")
    values.setdefault(key, entry)


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
        beside = f" on {opt('nodes', nodes[0])}" if nodes else ""
        raise ConfigError(
            f"{opt('gpus', gpus, place)}{beside} contradicts {opt('simulate', text, where)}, {each} GPUs on each "
            f"node; allowed: {opt('gpus')} as the total, {each} times the number of nodes; or leave gpus out"
        )
    return {**values, "gpus": (f"sim:{text}", where)}


def _over_site(users: Layer, site: Site, environ: Mapping[str, str], *, asks: bool) -> dict[str, tuple[Any, str]]:
    """Put the user's values above the site's; a list of the site stays in front of the user's list."""
    from hpcgpu.config.sites.rules import follow

    sites = follow(site, users, environ, asks=asks)
    defaults = read_layer({name: value for name, (value, _) in sites.items()}, lambda name: sites[name][1])
    values = {**defaults, **users}
    for name in users.keys() & defaults.keys():
        kind = BY_NAME[name].metadata["kind"]
        # A site file lists what its jobs need (-l filesystems=home): a user's additional directive must not replace all
        # of them. It replaces the site's directive for the same option.
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
    from difflib import get_close_matches

    # A site's module for this package may set names that are no options (HPCGPU_ROOT, HPCGPU_VERSION). So an unknown
    # name is an error only if it looks like a typing error.
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
