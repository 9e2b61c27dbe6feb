"""The pages for users of other tools, and the table of memory options, name options and keywords that exist."""

from __future__ import annotations

import re
from inspect import signature

import dask
import dask_mpi
import distributed  # noqa: F401 - brings its part of dask's configuration
import pytest
import yaml
from dask_jobqueue.core import JobQueueCluster
from dask_jobqueue.lsf import LSFJob
from dask_jobqueue.pbs import PBSJob
from dask_jobqueue.slurm import SLURMJob
from pages import PAGES, blocks
from paths import ROOT

import hpcgpu
from hpcgpu.config.layers import BY_NAME, read_settings
from hpcgpu.config.migration import HINTS, ignored, translate
from hpcgpu.errors import ConfigError
from hpcgpu.model.settings import options, user_name

OURS = {user_name(f) for f in options()} | set(hpcgpu.__all__)
ALIASES = {alias for f in options() for alias in f.metadata["aliases"]}
MEMORY = (ROOT / "docs/reference/memory-options.md").read_text()


def rows(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def is_configured(name: str) -> bool:
    return dask.config.get(name, None) is not None


def test_section_of_dask_jobqueue_is_read_as_the_page_says() -> None:
    [text] = blocks("dask-jobqueue", "yaml")
    section = yaml.safe_load(text)["jobqueue"]["slurm"]
    values, _ = translate(section, 4)
    assert values == {"queue": "gpu", "account": "m0000", "walltime": "02:00:00", "cores_per_gpu": 16}
    assert [text.split()[0] for text in ignored(section)] == ["processes"]


@pytest.mark.parametrize("page", PAGES)
def test_page_has_only_blocks_that_are_tried(page: str) -> None:
    tried = {"dask-mpi": (2, 3, 0, 0), "dask-cuda": (2, 0, 0, 0), "dask-jobqueue": (3, 1, 1, 1)}
    tried |= {"sbatch": (2, 0, 0, 0), "nemo-curator": (1, 0, 0, 0)}
    assert tuple(len(blocks(page, kind)) for kind in ("diff", "bash", "yaml", "python")) == tried[page]
    assert PAGES[page].count("```") == 2 * sum(tried[page])
    for diff in blocks(page, "diff"):
        if "import" in diff:
            compile("".join(x[1:] for x in diff.splitlines(keepends=True) if x[0] != "+"), page, "exec")
    for other, ours, _ in rows(PAGES[page]):
        assert set(re.findall(r"`([a-z_]+)`", ours)) <= OURS
        # a keyword that is the same here is taken under its name, too; another is answered
        if page not in ("dask-mpi", "sbatch", "nemo-curator"):
            assert {n for n in re.findall(r"`([a-z_]+)`", other) if n not in BY_NAME and n not in HINTS} == set()


def test_keywords_shared_with_other_packages_are_listed() -> None:
    jobs = {c for job in (SLURMJob, PBSJob, LSFJob) for c in (*job.__mro__[:2], JobQueueCluster)}
    keywords = {"dask-jobqueue": {n for c in jobs for n in signature(c.__init__).parameters}}
    keywords["dask-mpi"] = {n for f in (dask_mpi.execute, dask_mpi.initialize) for n in signature(f).parameters}
    for page, theirs in keywords.items():
        assert {n for n in theirs & BY_NAME.keys() - {"name", "scheduler"} if f"`{n}`" not in PAGES[page]} == set()


def test_memory_rows_name_options_that_exist() -> None:
    for other, _, name in rows(MEMORY):
        ours = name or other.split(", ")[0]
        assert ours == "-" or quoted(ours), other
        assert [n for n in quoted(ours) if not (is_configured(n) if n.startswith("distributed.") else n in OURS)] == []
        assert {n for n in quoted(other) if re.fullmatch(r"[a-z_]+", n)} <= OURS | ALIASES | set(HINTS)
        assert [n for n in quoted(other) if n.startswith("distributed.") and not is_configured(n)] == []


@pytest.mark.parametrize("row", [r for r in rows(MEMORY) if "an error" in r[1]], ids=lambda row: row[0][:40])
def test_memory_row_with_an_error_is_an_error(row: list[str]) -> None:
    name, _, value = quoted(row[0])[0].partition("=")
    with pytest.raises(ConfigError, match=name):
        read_settings({name: value.strip('"') or object()})
