"""Render and read the run document as one JSON line that fits one argv word; check settings that depend on each other.

The document holds no secret. Every leader reads it, and every rank its part for :mod:`hpcgpu.agent.rank`, so nothing is
imported here but json: a validator such as msgspec costs 10 to 30 ms of CPU.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from hpcgpu.config import read_value
from hpcgpu.errors import ConfigError
from hpcgpu.model.allocation import WRITTEN, parse_simulated
from hpcgpu.model.job import VERSION, RunDocument
from hpcgpu.model.limit import Limit
from hpcgpu.model.settings import Settings, options

if TYPE_CHECKING:
    from hpcgpu.model.site import Site


LIBRARIES = ("cupy", "torch")  # RMM has an allocator for these and for numba (rmm.allocators, 26.10)


def check_settings(settings: Settings, site: Site | None = None) -> None:
    """Raise ConfigError, with values and sources, if settings contradict each other or do not fit the site's nodes."""
    _check_trust(settings)
    _check_network(settings, site)
    _check_gpus(settings, site)
    _check_rapids(settings)


def _check_trust(settings: Settings) -> None:
    both = f"{settings.cite('protocol')} with {settings.cite('security')}"
    if settings.protocol == "ucx" and settings.security:
        raise ConfigError(f"{both}: UCX cannot encrypt; leave security out and accept it, or use protocol='tls'")
    if settings.protocol == "tls" and settings.security is False:
        raise ConfigError(f"{both}: leave one of the two out; without TLS it is protocol='tcp'")
    if settings.protocol == "tcp" and settings.security:
        raise ConfigError(f"{both}: tcp is not encrypted; leave protocol out, or use protocol='tls'")


def _check_network(settings: Settings, site: Site | None) -> None:
    if settings.protocol == "ucx" and "rendezvous" in settings.sources and settings.rendezvous == "mpi":
        raise ConfigError(
            f"{settings.cite('rendezvous')} with {settings.cite('protocol')}: MPI brings a UCX of its own into the "
            "process, with which the other does not work; leave rendezvous out: the ranks meet by files then"
        )
    if settings.protocol == "ucx" and site is not None and not site.ucx:
        cited = site.cited(site.network.source, "network", "ucx")
        raise ConfigError(
            f"{settings.cite('protocol')} on {site.name}: UCX has no transport for this site's network "
            f"({cited}); leave protocol out, which gives tls on the nearest interface"
        )


def _check_gpus(settings: Settings, site: Site | None) -> None:
    per_node = settings.gpus_per_node
    if per_node is None:
        return

    if settings.gpus is not None:
        count = parse_simulated(settings.gpus).per_node
        if count != per_node:
            raise ConfigError(
                f"{settings.cite('gpus_per_node')}, but {settings.cite('gpus')} simulates {count} on each node; leave "
                "gpus_per_node out"
            )
    elif site is not None and (node := site.node(settings.queue)) and per_node > node.gpus and settings.site_limits:
        cited = site.cited(node.source, *site.path_of(node), "gpus")
        raise ConfigError(
            f"{settings.cite('gpus_per_node')}, but a node of {site.name} has {node.gpus} ({cited}); allowed: 1 to "
            f"{node.gpus}; more GPUs by nodes="
        )


def _check_rapids(settings: Settings) -> None:
    cite = settings.cite
    if settings.rmm_async and settings.rmm_managed_memory:
        raise ConfigError(
            f"{cite('rmm_async')} with {cite('rmm_managed_memory')}: CUDA's asynchronous allocator gives no managed "
            "memory; leave one of the two out"
        )
    if settings.rmm_release_threshold and not settings.rmm_async:
        raise ConfigError(f"{cite('rmm_release_threshold')} is for rmm_async=True only; give it too, or leave it out")
    if settings.rmm_maximum_pool_size and not (settings.rmm_pool_size or settings.rmm_async):
        raise ConfigError(
            f"{cite('rmm_maximum_pool_size')} without a pool; give rmm_pool_size or rmm_async=True too, or leave it out"
        )
    pool, most = settings.rmm_pool_size, settings.rmm_maximum_pool_size
    # A fraction and bytes are compared later, when the GPU's size is known.
    if pool and most and pool.is_part == most.is_part and float(most.value) < float(pool.value):
        raise ConfigError(
            f"{cite('rmm_maximum_pool_size')} is less than {cite('rmm_pool_size')}; allowed: as much, or more"
        )
    if unknown := [name for name in settings.rmm_libraries if name not in LIBRARIES]:
        raise ConfigError(
            f"{cite('rmm_allocator_external_lib_list')}: RMM has no allocator for {unknown[0]!r}; "
            f"allowed: {', '.join(LIBRARIES)}"
        )
    if settings.cudf_spill_stats and not settings.enable_cudf_spill:
        raise ConfigError(f"{cite('cudf_spill_stats')} without enable_cudf_spill=True; give both, or neither")


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
        **{f.name: getattr(document, f.name) for f in fields(RunDocument)},
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
