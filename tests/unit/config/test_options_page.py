"""The page of all options is current."""

from __future__ import annotations

import os
import re

import options_page
import pytest
from pages import PAGES
from paths import ROOT

from hpcgpu.config.migration import DASK_CUDA
from hpcgpu.model.settings import options, user_name

WHOLE = {"scheduler_cls"}  # of which we have single options
PAGE = ROOT / "docs/reference/options.md"


def test_the_page_is_current() -> None:
    """``--update-golden`` writes it; read the difference."""
    text = options_page.render()
    if os.environ.get("UPDATE_GOLDEN"):
        PAGE.write_text(text)
    assert PAGE.read_text() == text


def test_every_option_is_there_with_all_its_names() -> None:
    text = PAGE.read_text()
    for f in options():
        name = user_name(f)
        assert text.count(f"### `{name}`\n") == 1
        assert re.search(rf"`--{name.replace('_', '-')}[ `]", text)
        assert f"`HPCGPU_{name.upper()}`" in text
        assert all(f"`{alias}`" in text for alias in f.metadata["aliases"])


def section(name: str) -> str:
    return PAGE.read_text().partition(f"### `{name}`\n")[2].partition("\n### ")[0].partition("\n## ")[0]


@pytest.mark.parametrize("name", [user_name(f) for f in options()])
def test_every_option_says_what_it_is_elsewhere(name: str) -> None:
    packages = [line for line in section(name).splitlines() if re.match(r"- (dask-|no counterpart)", line)]
    assert packages


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("job_extra_directives", "dask-jobqueue: `job_extra_directives`, the same; in place of `job_extra`"),
        ("memory", "dask-jobqueue: `memory`, the same; in place of `job_mem`, `mem`"),
        ("job_directives_skip", "dask-jobqueue: `job_directives_skip`, the same"),
        ("security", "dask-cuda: `security`, the same"),
        ("allocator", "no counterpart in dask-cuda, dask-jobqueue, dask-mpi"),
    ],
)
def test_another_package_has_all_its_names(name: str, line: str) -> None:
    assert f"\n- {line}" in section(name)


def test_the_page_agrees_with_the_pages_for_those_who_come_from_elsewhere() -> None:
    """A row with an option of ours: the option names each keyword of the row."""
    ours = {user_name(f) for f in options()}
    for page in ("dask-cuda", "dask-jobqueue", "dask-mpi"):
        for line in re.findall(r"^\| `.*$", PAGES[page], re.MULTILINE):
            there, here, *_ = (re.findall(r"`(\w+)`", cell) for cell in line.strip("|").split(" | "))
            if here and set(here) <= ours:
                said = "".join(
                    row for name in here for row in section(name).splitlines() if row.startswith(f"- {page}")
                )
                assert [n for n in there if f"`{n}`" not in said and n not in WHOLE] == [], (page, here)


def test_names_of_other_packages_are_theirs() -> None:
    """dask-cuda is not installed here; its names are those of the migration hints."""
    known = {"dask-cuda": {*DASK_CUDA, "n_workers", "scheduler_file"}, **options_page.signatures()}
    for package, instead in options_page.INSTEAD.items():
        assert {name for names in instead.values() for name in names} <= known[package]
        assert instead.keys() <= {user_name(f) for f in options()}


def test_words_keep_their_case() -> None:
    assert section("enable_cudf_spill").strip().startswith("cuDF spills its own objects")
    assert not re.search(r"^(Tls|CuDF|Mpi|Rmm)\b", PAGE.read_text(), re.MULTILINE)


@pytest.mark.parametrize("name", ["protocol", "rendezvous", "launcher", "scheduler", "shape", "ranks", "allocator"])
def test_choices_are_explained(name: str) -> None:
    """Each value, or what it means, stands in the text."""
    text = section(name).strip().partition("\n")[0]
    assert len(text) > 30
    if name in ("protocol", "rendezvous"):
        choices = next(f for f in options() if user_name(f) == name).metadata["choices"]
        assert [choice for choice in choices if f"'{choice}'" not in text] == []
