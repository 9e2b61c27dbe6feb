"""Options at an entry point, a way to start a cluster: their signature and documentation, and those without an effect.

Giving an option without an effect is an error. File, site and environment may set any option: they are for all entry
points.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import MISSING, Field
from inspect import Parameter, cleandoc
from textwrap import fill
from types import MappingProxyType
from typing import Any

from hpcgpu.config.layers import BY_NAME
from hpcgpu.errors import ConfigError
from hpcgpu.model.limit import Limit
from hpcgpu.model.settings import Settings, options, user_name

REQUEST = (
    *("nodes", "cores_per_gpu", "memory", "queue", "account", "job_name", "log_directory", "site_limits"),
    *("job_extra_directives", "job_directives_skip", "job_script_prologue"),
)
TIME = ("walltime", "drain")
CLIENT = ("shape", "scheduler", "client_grace", "dashboard_port")
START = ("ranks", "launcher")

_ASKED = (
    "it is asked of a batch system, and {entry_point} asks none; sbatch, salloc and qsub have options for it, and "
    "'hpcgpu plan', SLURMGPUCluster and PBSGPUCluster take it"
)
_REQUEST = {
    **dict.fromkeys(REQUEST, _ASKED),
    "nodes": "{entry_point} has the nodes on which it is started; salloc -N, sbatch -N or qsub -l select= asks for "
    "them, and 'hpcgpu plan', SLURMGPUCluster or PBSGPUCluster takes it",
    "memory": _ASKED + "; for each worker: memory_limit",
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
_UNUSED: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        RUN: {**_REQUEST, **_CLIENT, **_START},
        LAUNCH: {**_REQUEST, **_CLIENT},
        JOBSCRIPT: _CLIENT,
        RUNNER: {**_REQUEST, **_CLIENT, **_START, "python": _PYTHON},
        LOCAL: {
            **{n: _HERE for n in (*REQUEST, *TIME, *CLIENT) if n not in _ALSO_HERE},
            "progress": "it is for scripts of 'hpcgpu run' and 'hpcgpu launch'; distributed.progress(futures) is for "
            "the futures of a client",
        },
    }
)


def unused(entry_point: str, *, in_job: bool = True) -> Mapping[str, str]:
    """Return the options, by user name, without an effect at an entry point, each with advice; {}: another one."""
    if entry_point not in ENTRY_POINTS:
        return {}
    return {**_UNUSED[entry_point], **({} if in_job or entry_point == JOBSCRIPT else _TIME)}


def check_entry_point(entry_point: str, settings: Settings, names: Iterable[str], *, in_job: bool) -> None:
    """Raise ConfigError, with advice, for a given option that differs from its default and has no effect here."""
    vain, defaults = unused(entry_point, in_job=in_job), Settings()
    for name in names:
        option = BY_NAME.get(name)
        if option is None or user_name(option) not in vain:
            continue
        if getattr(settings, option.name) != getattr(defaults, option.name):
            typed = user_name(option)
            raise ConfigError(f"{settings.cite(typed)}: {vain[typed].format(entry_point=entry_point)}")


# The types of each kind of option; a choice has its values instead.
TYPES: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("count", "number"), "int"),
        **dict.fromkeys(("bytes", "duration"), "int or str"),
        **dict.fromkeys(("limit", "device-limit", "host-limit"), "float, int or str"),
        **dict.fromkeys(("text",), "str"),
        **dict.fromkeys(("gpus", "simulate", "port"), "int or str"),
        **dict.fromkeys(("texts", "lines"), "list of str"),
        "cores": "str or int",
        "nics": "str or list of str",
        "seconds": "float or str",
        "flag": "bool",
        "numbers": "dict of str to float",
        "environment": "dict of str to str",
    }
)
_KEYWORDS = re.compile(r"^\*\*keywords\n(?: +.*\n?)+", re.MULTILINE)
_SECTION = re.compile(r"^\w+\n-{3,}$", re.MULTILINE)


def parameters(without: Container[str] = ()) -> list[Parameter]:
    """Return a keyword parameter with its default for each option that is not in ``without``, by user name."""
    shown = (f for f in options() if user_name(f) not in without)
    return [Parameter(user_name(f), Parameter.KEYWORD_ONLY, default=default_of(f)) for f in shown]


def documented(text: str, base: str = "", without: Container[str] = ()) -> str:
    """Put the options, except ``without``, in place of ``**keywords`` in a class's docstring."""
    # The sections of base, the docstring of its base class, come before its own.
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
    return TYPES[f.metadata["kind"]]


def default_of(f: Field[Any]) -> Any:  # the option's own type
    """Return an option's default as users would write it."""
    if f.default_factory is not MISSING:
        return dict(f.default_factory())
    return f.default.value if isinstance(f.default, Limit) else f.default
