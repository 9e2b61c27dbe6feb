"""docs/reference/options.md, made from the settings, the entry points and the migration hints."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import Field
from typing import Any

from dask_jobqueue.core import JobQueueCluster
from dask_jobqueue.lsf import LSFJob
from dask_jobqueue.pbs import PBSJob
from dask_jobqueue.slurm import SLURMJob
from dask_mpi import execute, initialize

from hpcgpu.cli.command import MANY
from hpcgpu.config.entry_points import ENTRY_POINTS, default_of, type_of, unused
from hpcgpu.config.migration import DASK_CUDA, JOBQUEUE
from hpcgpu.model.settings import CUDF, GROUPS, RMM, options, user_name

HEAD = """# Options

Every option, made from `hpcgpu/model/settings.py` and the tables of `hpcgpu/config` by
`pytest tests/unit/config/test_options_page.py --update-golden`.

An option may be given as a keyword of the classes (`SLURMGPUCluster(nodes=2)`), as a flag of the commands
(`--nodes 2`), as a variable (`HPCGPU_NODES=2`), in Dask's configuration (`hpcgpu: {nodes: 2}`, hyphens or underscores),
and in a [site file](site-files.md) below `defaults`. The first of these that says something wins. Errors name the one
that was read. Bytes may be text (`"64GB"`, `"1.5 GiB"`), so may times (`"90s"`, `"2h"`, `"02:00:00"`).

Options that take several values are lists or mappings in Python and YAML; their flags may be repeated, one value each
(`--env A=1 --env B=2`), and their variables may be JSON (`HPCGPU_ENV='{"A": "1", "B": "2"}'`). Names of network ports,
libraries and resources have no commas, and so commas part them, too (`--resources A=1,B=2`). Commas in variables,
directives and shell lines belong to the value.

"""
_UNITS: Mapping[str, str] = {
    **dict.fromkeys(("duration", "seconds"), "seconds"),
    "bytes": "bytes",
    "port": "a port, `8787` or `':8787'`",
    "limit": "bytes, or a fraction of the GPU's memory",
    "device-limit": "bytes, or a fraction of the GPU's memory",
    "host-limit": "bytes, or a fraction of the node's memory",
}
# Keywords of LocalCUDACluster and of dask cuda worker (dask-cuda 26.10) that mean the same under the same name;
# docs/reference/memory-options.md says what is better here.
_CUDA = {"memory_limit", "device_memory_limit", "jit_unspill", "local_directory", "protocol", "threads_per_worker"}
_CUDA |= {"interface", "resources", "death_timeout", "set_rmm_allocator_for_libs", "security", "dashboard_address"}
_CUDA |= {"scheduler_port", *RMM, *CUDF}
# What has another name or another form there, and is in no migration hint: their keyword, and a remark.
INSTEAD: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "dask-cuda": {
        "gpus_per_node": {"n_workers": ""},
        "dashboard": dict.fromkeys(("http_prefix", "service_kwargs"), ""),
        "dashboard_port": {"diagnostics_port": ""},
        "rendezvous": {"scheduler_file": "of `dask cuda worker`"},
    },
    "dask-jobqueue": {
        "site": {"config_name": ""},
        "gpus_per_node": {"resource_spec": ""},
        "nthreads": {"cores": "divided by `processes`"},
        "cores_per_gpu": {"cores": "those of a job", "resource_spec": ""},
        "drain": {"worker_extra_args": "`--lifetime`"},
        "memory_limit": {"memory": "divided by `processes`"},
        "interface": {"scheduler_options": ""},
        "dashboard": {"scheduler_options": ""},
        "dashboard_port": {"dashboard_address": ""},
        "scheduler_port": {"scheduler_options": ""},
        "resources": {"worker_extra_args": "`--resources`", "extra": ""},
        "env": {"job_script_prologue": "lines with `export`", "env_extra": ""},
    },
    "dask-mpi": {
        "dashboard_port": {"dashboard_address": ""},
        "rendezvous": {"scheduler_file": ""},
        "resources": {"worker_options": '`{"resources": {...}}`'},
        "env": {"worker_options": '`{"env": {...}}`, of a Nanny'},
    },
}
# What is not quite the same under the same name.
_BUT: Mapping[tuple[str, str], str] = {
    **{(package, "security"): "a `Security` object is not taken here" for package in ("dask-cuda", "dask-jobqueue")},
    ("dask-cuda", "jit_unspill"): "gone there since 26.06",
    ("dask-jobqueue", "job_directives_skip"): "whole options here, parts of lines there",
    ("dask-jobqueue", "python"): "one program here, shell words there",
}


def signatures() -> dict[str, set[str]]:
    """Return the keywords of the packages that are installed here."""
    jobs = {c for job in (SLURMJob, PBSJob, LSFJob) for c in (*job.__mro__[:2], JobQueueCluster)}
    jobqueue = {n for c in jobs for n in inspect.signature(c.__init__).parameters}
    mpi = {n for f in (initialize, execute) for n in inspect.signature(f).parameters}
    return {"dask-jobqueue": jobqueue, "dask-mpi": mpi}


def theirs() -> dict[str, set[str]]:
    """Return the options' names in each of the other packages, as far as they mean the same here."""
    keywords = signatures()
    return {
        "dask-cuda": _CUDA,
        "dask-jobqueue": keywords["dask-jobqueue"] - JOBQUEUE.keys() - {"cores", "scheduler", "name"},
        "dask-mpi": keywords["dask-mpi"] - {"nanny", "scheduler", "name"},
    }


def render() -> str:
    """Return the page."""
    by_name = {user_name(f): f for f in options()}
    names = theirs()
    groups = ("".join(line + "\n" for n in m for line in _entry(by_name[n], names)) for m in GROUPS.values())
    return HEAD + "".join(f"## {name}\n\n{text}" for name, text in zip(GROUPS, groups, strict=True)).rstrip("\n") + "\n"


def _entry(f: Field[Any], names: Mapping[str, set[str]]) -> Iterator[str]:
    name, meta = user_name(f), f.metadata
    flag = name.replace("_", "-")
    kind = " or ".join(f"`{c!r}`" for c in meta["choices"]) or type_of(f)
    unit = _UNITS.get(meta["kind"], "")
    yield f"### `{name}`\n\n{_sentence(meta['text'])}\n"
    also = "".join(f"; {word}" for word in (unit, meta["example"] and f"such as `{meta['example']}`") if word)
    yield f"- value: {kind}{also}"
    yield f"- default: {_shown(default_of(f))}"
    typed = f"`--{flag} {MANY[meta['kind']]}`, may be repeated" if meta["kind"] in MANY else f"`--{flag}`"
    flags = f"`--{flag}`, `--no-{flag}`" if meta["kind"] == "flag" else typed
    yield f"- flag: {flags}; configuration: `hpcgpu.{flag}`; variable: `HPCGPU_{name.upper()}`"
    if meta["aliases"]:
        yield f"- also called: {_code(meta['aliases'])}"
    if refused := [entry_point for entry_point in ENTRY_POINTS if name in unused(entry_point)]:
        yield f"- without effect, and so refused, at: {', '.join(refused)}"
    counterparts = {package: _there(package, (name, *meta["aliases"]), keywords) for package, keywords in names.items()}
    yield from (f"- {package}: {text}" for package, text in counterparts.items() if text)
    if not any(counterparts.values()):
        yield f"- no counterpart in {', '.join(names)}"
    yield ""


def _there(package: str, ours: tuple[str, ...], keywords: set[str]) -> str:
    texts = []
    if same := [n for n in ours if n in keywords]:
        texts += [f"{_code(same)}, the same", *filter(None, [_BUT.get((package, ours[0]), "")])]
    hints = {"dask-jobqueue": JOBQUEUE, "dask-cuda": DASK_CUDA}.get(package, {})
    hinted = re.compile(rf"\b(give|and) {ours[0]}\b")
    instead = {n: "" for n, hint in hints.items() if hinted.search(hint.instead)}
    instead |= INSTEAD[package].get(ours[0], {})
    if instead:
        named = (f"`{n}`{f' ({remark})' if remark else ''}" for n, remark in instead.items())
        texts.append(f"in place of {', '.join(named)}")
    return "; ".join(texts)


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{n}`" for n in names)


def _shown(default: object) -> str:
    return "not set" if default in (None, (), {}) else f"`{default!r}`"


def _sentence(text: str) -> str:
    first = text.split(maxsplit=1)[0]
    return f"{text if first != first.lower() else text[0].upper() + text[1:]}."  # cuDF, RMM
