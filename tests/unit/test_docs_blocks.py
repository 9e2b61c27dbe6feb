"""Every block of code of the documentation is tried somewhere; those that cannot run here are read by a parser."""

from __future__ import annotations

import re
from pathlib import Path

import doc_blocks
import pytest
from doc_blocks import PAGES, Block

# What is read, and not typed: output, pictures, files of a site or a configuration; what Sphinx replaces.
SHOWN = {"", "text", "yaml", "json", "{toctree}", "{eval-rst}"}
SHELL_OR_PYTHON = [(page, b) for page in PAGES for b in doc_blocks.blocks(page) if b.kind in ("bash", "python")]


def name(value: object) -> str:
    return value.stem if isinstance(value, Path) else str(getattr(value, "text", value)).partition("\n")[0][:40]


@pytest.mark.parametrize(("page", "block"), SHELL_OR_PYTHON, ids=name)
def test_what_is_shown_may_be_typed(page: Path, block: Block) -> None:
    doc_blocks.check(block)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_fence_is_a_block_that_was_read(page: Path) -> None:
    found = doc_blocks.blocks(page)
    assert len(re.findall("^```", page.read_text(), re.M)) == 2 * len(found)
    assert {b.kind for b in found} <= {"bash", "python", *SHOWN}, "give the block a language that a test knows"


@pytest.mark.parametrize(
    "block",
    [
        Block("checked", "", "bash", "hpcgpu plan --sit perlmutter\n"),
        Block("checked", "", "bash", "rm -rf /\n"),
        Block("checked", "", "python", "from hpcgpu import SLURMGPUCluster\nSLURMGPUCluster(node=2)\n"),
    ],
    ids=name,
)
def test_what_may_not_be_typed_is_found(block: Block) -> None:
    with pytest.raises(Exception, match=r"nothing tries|takes no|[Nn]o such option"):
        doc_blocks.check(block)
