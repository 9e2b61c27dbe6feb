"""docs/reference/options.md, made from the settings, the entry points and the migration hints."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import Field
from typing import Any

from dask_jobqueue.slurm import SLURMJob
from dask_mpi import execute, initialize

from hpcgpu.config.entry_points import ENTRY_POINTS, unused
from hpcgpu.config.migration import DASK_CUDA, JOBQUEUE
from hpcgpu.config.numpydoc import default_of, type_of
from hpcgpu.model.settings import CUDF, GROUPS, RMM, options, user_name

HEAD = """# Options

Every option, made from `hpcgpu/model/settings.py` and the tables of `hpcgpu/config` by
`pytest tests/unit/config/test_options_page.py --update-golden`.

An option may be given as a keyword of the classes (`SLURMGPUCluster(nodes=2)`), as a flag of the commands
(`--nodes 2`), as a variable (`HPCGPU_NODES=2`), in Dask's configuration (`hpcgpu: {nodes: 2}`, hyphens or underscores),
and in a [site file](site-files.md) below `defaults`. The first of these that says something wins. Errors name the one
that was read. Bytes may be text (`"64GB"`, `"1.5 GiB"`), so may times (`"90s"`, `"2h"`, `"02:00:00"`).

"""
_UNITS: Mapping[str, str] = {
    **dict.fromkeys(("duration", "seconds"), "seconds"),
    "bytes": "bytes",
    "limit": "bytes, or a fraction of the GPU's memory",
    "device-limit": "bytes, or a fraction of the GPU's memory",
    "host-limit": "bytes, or a fraction of the node's memory",
}
# Keywords of LocalCUDACluster and of dask cuda worker (dask-cuda 26.10) that mean the same under the same name;
# docs/reference/memory-options.md says what is better here.
_CUDA = {"memory_limit", "device_memory_limit", "jit_unspill", "local_directory", "protocol", "threads_per_worker"}
_CUDA |= {"interface", "resources", "death_timeout", "set_rmm_allocator_for_libs", *RMM, *CUDF}


def theirs() -> dict[str, set[str]]:
    """Return the options' names in each of the other packages, as far as they mean the same here."""
    jobqueue = {n for c in SLURMJob.__mro__[:2] for n in inspect.signature(c.__init__).parameters}
    mpi = {n for f in (initialize, execute) for n in inspect.signature(f).parameters}
    return {
        "dask-cuda": _CUDA,
        "dask-jobqueue": jobqueue - JOBQUEUE.keys() - {"cores", "scheduler", "security", "job_directives_skip"},
        "dask-mpi": mpi - {"nanny", "scheduler", "name"},
    }


def render() -> str:
    """Return the page."""
    by_name = {user_name(f): f for f in options()}
    names = theirs()
    lines = [HEAD]
    for group, members in GROUPS.items():
        lines.append(f"## {group}\n\n")
        for name in members:
            lines += [f"{line}\n" for line in _entry(by_name[name], names)]
    return "".join(lines).rstrip("\n") + "\n"


def _entry(f: Field[Any], names: Mapping[str, set[str]]) -> Iterator[str]:
    name, meta = user_name(f), f.metadata
    flag = name.replace("_", "-")
    kind = " or ".join(f"`{c!r}`" for c in meta["choices"]) or type_of(f)
    unit = _UNITS.get(meta["kind"], "")
    yield f"### `{name}`"
    yield ""
    yield f"{_sentence(meta['text'])}"
    yield ""
    also = "".join(f"; {word}" for word in (unit, meta["example"] and f"such as `{meta['example']}`") if word)
    yield f"- value: {kind}{also}"
    yield f"- default: {_shown(default_of(f))}"
    flags = f"`--{flag}`, `--no-{flag}`" if meta["kind"] == "flag" else f"`--{flag}`"
    yield f"- flag: {flags}; configuration: `hpcgpu.{flag}`; variable: `HPCGPU_{name.upper()}`"
    if meta["aliases"]:
        yield f"- also called: {_code(meta['aliases'])}"
    if refused := [entry_point for entry_point in ENTRY_POINTS if name in unused(entry_point)]:
        yield f"- without effect, and so refused, at: {', '.join(refused)}"
    for package, there in names.items():
        if found := _there(package, (name, *meta["aliases"]), there):
            yield f"- {package}: {found}"
    yield ""


def _there(package: str, ours: tuple[str, ...], there: set[str]) -> str:
    if same := [n for n in ours if n in there]:
        return f"{_code(same)}, the same"
    hints = {"dask-jobqueue": JOBQUEUE, "dask-cuda": DASK_CUDA}.get(package, {})
    given = re.compile(rf"\b(give|and) {ours[0]}\b")
    instead = [n for n, hint in hints.items() if given.search(hint.instead)]
    return f"in place of {_code(instead)}" if instead else ""


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{n}`" for n in names)


def _shown(default: object) -> str:
    return "not set" if default in (None, (), {}) else f"`{default!r}`"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."
