"""The tables of docs/reference/memory-options.md name what there is."""

from __future__ import annotations

import re

import dask
import distributed  # noqa: F401 - brings its part of dask's configuration
import pytest
from paths import ROOT

import hpcgpu
from hpcgpu.config.layers import read_settings
from hpcgpu.config.migration import HINTS
from hpcgpu.errors import ConfigError
from hpcgpu.model.settings import options, user_name

TEXT = (ROOT / "docs" / "reference" / "memory-options.md").read_text()
ROWS = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in TEXT.splitlines() if line.startswith("| `")]
OURS = {user_name(f) for f in options()}
ALIASES = {alias for f in options() for alias in f.metadata["aliases"]}
MEMORY_KEYS = {f"distributed.worker.memory.{key}" for key in dask.config.get("distributed.worker.memory")}


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def is_known(name: str) -> bool:
    if name.startswith("distributed."):
        return dask.config.get(name, None) is not None
    return name in OURS | set(hpcgpu.__all__)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:40])
def test_a_row_names_what_there_is(row: list[str]) -> None:
    there, _, _, here = row
    assert here == "-" or (quoted(here) and all(map(is_known, quoted(here))))
    for name in quoted(there):
        if re.fullmatch(r"[a-z_]+", name):
            assert name in OURS | ALIASES | set(HINTS)
        if name.startswith("distributed."):
            assert dask.config.get(name, None) is not None


@pytest.mark.parametrize("row", [r for r in ROWS if "an error" in r[2]], ids=lambda row: row[0][:40])
def test_what_is_called_an_error_is_one(row: list[str]) -> None:
    name, _, value = quoted(row[0])[0].partition("=")
    with pytest.raises(ConfigError, match=name):
        read_settings({name: value.strip('"') or object()})


def test_all_options_have_a_row() -> None:
    named = {name.partition("=")[0] for row in ROWS for name in quoted(row[0])}
    theirs = {n for n in HINTS if n.startswith("rmm_") or "spill" in n or n in ("data", "shared_filesystem")}
    assert theirs - named == set()
    assert {key for key in MEMORY_KEYS if not any(name.startswith(key) for name in named)} == set()
    memory = {"device_memory_limit", "memory_limit", "jit_unspill", "local_directory", "allocator"}
    assert memory - {name for row in ROWS for name in quoted(row[3])} == set()
