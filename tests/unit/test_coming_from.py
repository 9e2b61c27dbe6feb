"""The pages for those who come from another tool name what there is."""

from __future__ import annotations

import inspect
import re

import pytest
import yaml
from dask_jobqueue.slurm import SLURMJob
from dask_mpi import execute, initialize
from pages import PAGES, blocks
from paths import ROOT

import hpcgpu
from hpcgpu.config.jobqueue import ignored, translate
from hpcgpu.config.layers import BY_NAME
from hpcgpu.config.migration import DASK_CUDA, HINTS
from hpcgpu.model.settings import options, user_name

OURS = {user_name(f) for f in options()} | set(hpcgpu.__all__)


def before(diff: str) -> str:
    return "".join(line[1:] for line in diff.splitlines(keepends=True) if not line.startswith("+"))


def rows(page: str) -> list[list[str]]:
    lines = [line for line in PAGES[page].splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_the_section_of_the_page_is_read_as_it_says() -> None:
    [text] = blocks("dask-jobqueue", "yaml")
    section = yaml.safe_load(text)["jobqueue"]["slurm"]
    values, _ = translate(section, 4)
    assert values == {"queue": "gpu", "account": "m0000", "walltime": "02:00:00", "cores_per_gpu": 16}
    assert [said.split()[0] for said in ignored(section)] == ["processes"]


@pytest.mark.parametrize("page", PAGES)
def test_every_example_is_tried_and_is_python_before_too(page: str) -> None:
    tried = {"dask-mpi": (2, 3, 0, 0), "dask-cuda": (2, 0, 0, 0), "dask-jobqueue": (3, 1, 1, 1)}
    tried |= {"sbatch": (2, 0, 0, 0), "nemo-curator": (1, 0, 0, 0)}
    assert tuple(len(blocks(page, kind)) for kind in ("diff", "bash", "yaml", "python")) == tried[page]
    assert PAGES[page].count("```") == 2 * sum(tried[page])
    for diff in blocks(page, "diff"):
        if "import" in diff:
            compile(before(diff), page, "exec")


@pytest.mark.parametrize(("page", "row"), [(page, row) for page in PAGES for row in rows(page)], ids=str)
def test_a_row_names_what_there_is(page: str, row: list[str]) -> None:
    there, here, _ = row
    for name in re.findall(r"`([a-z_]+)`", here):
        assert name in OURS
    # what is the same here is taken under their name, too; what is not is answered
    for name in re.findall(r"`([a-z_]+)`", there):
        assert name in BY_NAME or name in HINTS or page in ("dask-mpi", "sbatch", "nemo-curator")


def test_all_their_keywords_have_a_row() -> None:
    named = {page: set(re.findall(r"[A-Za-z_]+", " ".join(row[0] for row in rows(page)))) for page in PAGES}
    jobqueue = {n for c in SLURMJob.__mro__[:2] for n in inspect.signature(c.__init__).parameters}
    assert jobqueue - {"self", "scheduler", "name", "base_class_kwargs"} <= named["dask-jobqueue"]
    mpi = {n for f in (initialize, execute) for n in inspect.signature(f).parameters}
    assert mpi - {"function", "client_function", "client_args", "client_kwargs", "kwargs"} <= named["dask-mpi"]
    memory = (ROOT / "docs/reference/memory-options.md").read_text()
    assert {n for n in DASK_CUDA if n not in named["dask-cuda"] and f"`{n}`" not in memory} == set()
