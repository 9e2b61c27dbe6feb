"""Every block of code of the documentation is tried somewhere; those that cannot run here are read by a parser."""

from __future__ import annotations

import re
from pathlib import Path

import doc_blocks
import pytest
from doc_blocks import PAGES, Block
from paths import ROOT

# What is read, and not typed: output, pictures, files of a site or a configuration; what Sphinx replaces.
SHOWN = {"", "text", "yaml", "json", "{toctree}", "{eval-rst}"}
# All pages with commands, those of the folders too that have tests of their own; pytest leaves one in .pytest_cache.
TEXTS = [*sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("[!.]*/README.md"))]
TEXTS += [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
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


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_the_file_of_a_block_is_named_where_people_see_it(page: Path) -> None:
    files = [block for block in doc_blocks.blocks(page) if block.file]
    assert [block.file for block in files if f"`{block.file}`:" not in block.before] == []


def test_pages_have_such_files() -> None:
    files = {block.file for page in PAGES for block in doc_blocks.blocks(page)} - {""}
    assert files == {"hello.py", "two_nodes.py", "life.py", "pipeline_test.py", "prometheus.yml"}


@pytest.mark.parametrize("page", TEXTS, ids=name)
def test_no_command_is_in_a_block_without_a_language(page: Path) -> None:
    assert [line for block in doc_blocks.blocks(page) for line in doc_blocks.typed(block)] == []


@pytest.mark.parametrize("page", TEXTS, ids=name)
def test_commands_in_a_sentence_are_commands(page: Path) -> None:
    for line in doc_blocks.mentions(page.read_text()):
        doc_blocks.check_mention(line)


def test_a_command_in_the_wrong_place_or_without_such_an_option_is_found() -> None:
    output = Block("run", "", "", "hpcgpu: READY 8 workers\nmakes 3\n")
    assert doc_blocks.typed(output) == []
    assert doc_blocks.typed(Block("run", "", "", "# so:\n$ hpcgpu ps\n")) == ["$ hpcgpu ps"]
    assert doc_blocks.typed(Block("run", "", "bash", "hpcgpu ps\n")) == []
    text = "Type `hpcgpu topo\n--from`.\n```bash\n`hpcgpu x`\n```\n`hpcgpu.worker`"
    text += ", `hpcgpu run --gpu sim:2 a.py`, `hpcgpu dance`"
    line, option, command = doc_blocks.mentions(text)
    assert (line, option, command) == ("hpcgpu topo --from", "hpcgpu run --gpu sim:2 a.py", "hpcgpu dance")
    doc_blocks.check_mention(line)
    for wrong in (option, command):
        with pytest.raises(Exception, match=r"[Nn]o such option|no command"):
            doc_blocks.check_mention(wrong)
