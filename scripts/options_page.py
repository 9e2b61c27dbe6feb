"""docs/reference/options.md, made from the settings and the entry points."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import Field
from typing import Any

from hpcgpu.config.entry_points import ENTRY_POINTS, unused
from hpcgpu.config.keywords import default_of, type_of
from hpcgpu.model.settings import GROUPS, options, user_name

HEAD = """# Options

Made by `pytest tests/unit/config/test_entry_points.py --update-golden`.

The first of these that has a value wins, and errors name it: a keyword of the classes (`gpus_per_node=4`) or a flag of
the commands (`--gpus-per-node 4`; on and off: `--jit-unspill`, `--no-jit-unspill`), a variable
(`HPCGPU_GPUS_PER_NODE=4`), Dask's configuration (`hpcgpu: {gpus-per-node: 4}`, or underscores), `defaults` of a [site
file](site-files.md). Bytes may be text (`"64GB"`, `"1.5 GiB"`), so may seconds (`"90s"`). `walltime` has a unit or
colons (`"2h"`, `"02:00:00"`; `"30:00"` is minutes and seconds), and quotes in YAML: a bare 30, minutes to Slurm and
seconds to PBS, is refused. Fractions are of the GPU's memory; that of `memory_limit` is of the node's.

Options with several values are lists or mappings in Python and YAML. Their flags may be repeated (`--env A=1 --env
B=2`), their variables may be JSON (`HPCGPU_ENV='{"A": "1"}'`). Commas separate names of ports, libraries and resources
(`--resources A=1,B=2`); in variables, directives and shell lines they belong to the value.

What they are called elsewhere: [dask-cuda](../coming-from/dask-cuda.md),
[dask-jobqueue](../coming-from/dask-jobqueue.md), [dask-mpi](../coming-from/dask-mpi.md).

"""
_UNITS: Mapping[str, str] = {
    "duration": "time",
    "seconds": "seconds",
    "bytes": "bytes",
    "port": "a port, or `':8787'`",
    **dict.fromkeys(("limit", "device-limit", "host-limit"), "bytes or fraction"),
}


def render() -> str:
    """Return the page."""
    by_name = {user_name(f): f for f in options()}
    out = [HEAD.rstrip("\n")]
    for group, members in GROUPS.items():
        rows = [_row(by_name[name]) for name in members]
        out.append("\n".join((f"## {group}\n", *rows)))
    places: dict[str, list[str]] = {}
    for name in (name for members in GROUPS.values() for name in members):
        if refused := [entry_point for entry_point in ENTRY_POINTS if name in unused(entry_point)]:
            places.setdefault(", ".join(refused), []).append(name)
    refused_rows = [f"| {where} | {_code(members)} |" for where, members in places.items()]
    head = "## Without effect, and so refused\n\n| at | options |\n|---|---|"
    return "\n\n".join((*out, "\n".join((head, *refused_rows)))) + "\n"


def _row(f: Field[Any]) -> str:
    name, meta = user_name(f), f.metadata
    kind = " or ".join(f"`{c!r}`" for c in meta["choices"]) or type_of(f)
    unit = _UNITS.get(meta["kind"], "")
    shown = unit or ("" if kind in ("str", "bool") else kind)
    default = default_of(f)
    parts = (shown, meta["example"] and f"such as `{meta['example']}`", f"default `{default!r}`")
    value = "; ".join(part for part in parts[: 2 if default in (None, (), {}) else 3] if part)
    also = f" (or {_code(meta['aliases'])})" if meta["aliases"] else ""
    return f"- **`{name}`**{also}: {value}{'. ' if value else ''}{_sentence(meta['text'])}"


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{n}`" for n in names)


def _sentence(text: str) -> str:
    text = re.sub(r"'([^' ]+)'", r"`\1`", text)  # quotes would become typographic, and -- a dash
    first = text.split(maxsplit=1)[0]
    return f"{text if first != first.lower() else text[0].upper() + text[1:]}."  # cuDF, RMM
