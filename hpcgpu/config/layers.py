"""Merge five layers of configuration into one :class:`~hpcgpu.model.Settings` that records each value's source.

The first layer with a value wins: keywords or flags, environment (``HPCGPU_<NAME>``), dask configuration (``hpcgpu:``),
its section for dask-jobqueue where a job is submitted, the site file, the default.

Together: keywords in signatures and docstrings are those that a layer may have.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import MISSING, Field
from inspect import Parameter, cleandoc
from textwrap import fill
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from hpcgpu.config.checks import check_settings
from hpcgpu.config.migration import HINTS
from hpcgpu.config.values import KINDS, Layer, nearest, option_of, read_value
from hpcgpu.errors import ConfigError, marked, opt
from hpcgpu.model.allocation import parse_simulated
from hpcgpu.model.settings import GROUPS, Limit, Settings, options, user_name

if TYPE_CHECKING:
    from hpcgpu.model.site import Site  # 20 dataclasses: 10 CPU ms, which each command and rank would pay


PREFIX = "HPCGPU_"
BY_NAME: Mapping[str, Field[Any]] = MappingProxyType(
    {name: f for f in options() for name in (user_name(f), *f.metadata["aliases"])}
)
# Given as a keyword, None means "no limit" to Dask and dask-cuda; for all other options None means "not given".
_NONE_IS_OFF = ("device_memory_limit", "memory_limit")
_JIT = "DASK_JIT_UNSPILL"  # dask-cuda's variable, until 26.04
REQUEST = ("nodes", *(name for name in GROUPS["Batch job"] if name != "walltime"))
TIME = ("walltime", "drain", "requeue")
CLIENT = ("shape", "scheduler", "client_grace", "dashboard_port")
START = ("ranks", "launcher", "environment")
_ASKED = (
    "it is asked of a batch system, and {entry_point} asks none; sbatch, salloc and qsub have options for it, and "
    "'hpcgpu plan', SLURMGPUCluster and PBSGPUCluster take it"
)
_OF_A_WORKER = f"; for each worker: {opt('memory_limit', None)}"
_REQUEST = {
    **dict.fromkeys(REQUEST, _ASKED),
    "nodes": "{entry_point} has the nodes on which it is started; salloc -N, sbatch -N or qsub -l select= asks for "
    "them, and 'hpcgpu plan', SLURMGPUCluster or PBSGPUCluster takes it",
    "memory": _ASKED + _OF_A_WORKER,
}
_TIME = dict.fromkeys(TIME, "{entry_point} in no job has no time limit; 'hpcgpu plan' and the classes take it")
_CLIENT = dict.fromkeys(
    CLIENT, "{entry_point} is for a cluster inside its job, with its script; SLURMGPUCluster and PBSGPUCluster take it"
)
_START = dict.fromkeys(START, "{entry_point} is one rank, and starts no others; 'hpcgpu launch' takes it")
_PYTHON = "its ranks have the Python that runs the script; start the script by another, or take 'hpcgpu run'"
_HERE = "this cluster is the GPUs of one machine; leave it out, or take a class of a batch system"
_ALSO_HERE = ("job_name", "log_directory", "client_grace", "dashboard_port")
RUN, LAUNCH, JOBSCRIPT, RUNNER, LOCAL = ENTRY_POINTS = (
    *("hpcgpu run", "hpcgpu launch", "hpcgpu plan with a script"),
    *("GPURunner", "LocalGPUCluster"),
)
_UNUSED: Mapping[str, Mapping[str, str]] = {
    RUN: {**_REQUEST, **_CLIENT, **_START},
    LAUNCH: {**_REQUEST, **_CLIENT},
    JOBSCRIPT: _CLIENT,
    RUNNER: {**_REQUEST, **_CLIENT, **_START, "python": _PYTHON},
    LOCAL: {
        **{n: _HERE for n in (*REQUEST, *TIME, *CLIENT) if n not in _ALSO_HERE},
        "memory": _HERE + _OF_A_WORKER,
        "environment": _HERE,
    },
}
_KEYWORDS = re.compile(r"^\*\*keywords\n(?: +.*\n?)+", re.MULTILINE)
_SECTION = re.compile(r"^\w+\n-{3,}$", re.MULTILINE)


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


def unused(entry_point: str, *, in_job: bool = True) -> Mapping[str, str]:
    """Return the options, by user name, without an effect at an entry point, each with advice; {}: another one."""
    if entry_point not in ENTRY_POINTS:
        return {}
    return {**_UNUSED[entry_point], **({} if in_job or entry_point == JOBSCRIPT else _TIME)}


def check_entry_point(entry_point: str, settings: Settings, names: Iterable[str], *, in_job: bool) -> None:
    """Raise ConfigError, with advice, for given options that differ from their defaults and have no effect here."""
    vain, defaults = unused(entry_point, in_job=in_job), Settings()
    options_ = dict.fromkeys(user_name(option) for name in names if (option := BY_NAME.get(name)))
    wrong = [
        f"{settings.opt(name)}: {vain[name].format(entry_point=entry_point)}"
        for name in options_
        if name in vain and getattr(settings, BY_NAME[name].name) != getattr(defaults, BY_NAME[name].name)
    ]
    if wrong:
        raise ConfigError("\n".join(wrong))


def parameters(without: Container[str] = ()) -> list[Parameter]:
    """Return a keyword parameter with its default for each option that is not in ``without``, by user name."""
    shown = (f for f in options() if user_name(f) not in without)
    return [Parameter(user_name(f), Parameter.KEYWORD_ONLY, default=default_of(f)) for f in shown]


def documented(text: str, base: str = "", without: Container[str] = ()) -> str:
    """Put the options, except ``without``, in place of ``**keywords`` in a class's docstring, after its base's."""
    text, base = cleandoc(text), cleandoc(base)
    start = match.start() if (match := _SECTION.search(text)) else len(text)
    before = base[match.start() :] if (match := _SECTION.search(base)) else ""
    whole = "\n\n".join(filter(None, (text[:start].strip(), before.strip(), text[start:].strip())))
    return _KEYWORDS.sub(lambda _: "".join(_entries(without)), f"{whole}\n")


def _entries(without: Container[str]) -> Iterator[str]:
    for f in options():
        if user_name(f) in without:
            continue
        default = default_of(f)
        note = "optional" if default in (None, (), {}) else f"default {default!r}"
        example = f", such as {f.metadata['example']}" if f.metadata["example"] else ""
        also = f"; also {', '.join(f.metadata['aliases'])}" if f.metadata["aliases"] else ""
        text = fill(f"{f.metadata['text']}{example}{also}", 96, initial_indent="    ", subsequent_indent="    ")
        yield f"{user_name(f)} : {type_of(f)}, {note}\n{text}\n"


def type_of(f: Field[Any]) -> str:
    """Return an option's type as numpydoc shows it."""
    if choices := f.metadata["choices"]:
        return f"{{{', '.join(map(repr, choices))}}}"
    return KINDS[f.metadata["kind"]][1]


def default_of(f: Field[Any]) -> Any:  # the option's own type
    """Return an option's default as users would write it."""
    if f.default_factory is not MISSING:
        return dict(f.default_factory())
    return f.default.value if isinstance(f.default, Limit) else f.default
