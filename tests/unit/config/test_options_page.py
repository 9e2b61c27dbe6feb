"""The page of all options is current; scripts/options_page writes it."""

from __future__ import annotations

import re

import options_page
from golden import check_golden
from pages import PAGES
from paths import ROOT

from hpcgpu.model.settings import options, user_name

WHOLE = {"scheduler_cls"}  # of which we have single options
PAGE = ROOT / "docs/reference/options.md"


def test_the_page_is_current() -> None:
    check_golden(PAGE, options_page.render())


def test_every_option_is_there_with_all_its_names() -> None:
    text = PAGE.read_text()
    for f in options():
        name = user_name(f)
        assert text.count(f"### `{name}`\n") == 1
        assert re.search(rf"`--{name.replace('_', '-')}[ `]", text)
        assert f"`HPCGPU_{name.upper()}`" in text
        assert all(f"`{alias}`" in text for alias in f.metadata["aliases"])
        assert re.search(r"^- (dask-|no counterpart)", section(name), re.MULTILINE)
        assert len(section(name).strip().partition("\n")[0]) > 10
    assert "\n- dask-jobqueue: `memory`, the same; in place of `job_mem`, `mem`" in section("memory")
    assert "\n- no counterpart in dask-cuda, dask-jobqueue, dask-mpi" in section("allocator")
    assert not re.search(r"^(Tls|CuDF|Mpi|Rmm)\b", text, re.MULTILINE)


def section(name: str) -> str:
    return PAGE.read_text().partition(f"### `{name}`\n")[2].partition("\n### ")[0].partition("\n## ")[0]


def test_options_page_agrees_with_the_coming_from_pages() -> None:
    """A row with an option of ours: the option names each keyword of the row."""
    ours = {user_name(f) for f in options()}
    for page in ("dask-cuda", "dask-jobqueue", "dask-mpi"):
        for line in re.findall(r"^\| `.*$", PAGES[page], re.MULTILINE):
            there, here, *_ = (re.findall(r"`(\w+)`", cell) for cell in line.strip("|").split(" | "))
            if here and set(here) <= ours:
                rows = [row for name in here for row in section(name).splitlines() if row.startswith(f"- {page}")]
                said = "".join(rows)
                assert [n for n in there if f"`{n}`" not in said and n not in WHOLE] == [], (page, here)
