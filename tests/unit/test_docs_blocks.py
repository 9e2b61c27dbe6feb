"""Every block of code and every command of the documentation is tried: run somewhere, or read by a parser."""

from __future__ import annotations

import re
from pathlib import Path

import doc_blocks
import pytest
from click.testing import CliRunner
from doc_blocks import PAGES
from pages import LINES, line
from paths import ROOT

from hpcgpu.cli.commands import hpcgpu

# Blocks to read, not to type: output, pictures, files of a site or a configuration; Sphinx replaces two.
SHOWN = {"", "text", "yaml", "json", "{toctree}", "{eval-rst}"}
# All pages with commands, those of the folders too that have tests of their own; pytest leaves one in .pytest_cache.
TEXTS = [*sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("[!.]*/README.md"))]
TEXTS += [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_blocks_of_a_page_may_be_typed(page: Path) -> None:
    blocks = doc_blocks.blocks(page)
    assert len(re.findall("^```", page.read_text(), re.M)) == 2 * len(blocks)
    assert {b.kind for b in blocks} <= {"bash", "python", *SHOWN}, "give the block a language that a test knows"
    for block in blocks:
        assert not block.file or f"`{block.file}`:" in block.before, "people do not see the comment with the file"
        if block.kind in ("bash", "python"):
            doc_blocks.check(block)


def test_commands_of_all_pages_are_commands() -> None:
    for page in TEXTS:
        assert [text for block in doc_blocks.blocks(page) for text in doc_blocks.typed(block)] == [], page
        for text in doc_blocks.mentions(page.read_text()):
            doc_blocks.check_mention(text)


def test_readme_is_short_and_its_lines_are_tried() -> None:
    tried = ("make ", ". .venv/bin/activate", "sbatch ", "hpcgpu launch ", "mpirun ", "hpcgpu run ", "pip install ")
    tried += ("hpcgpu site list", "hpcgpu plan ", "hpcgpu doctor", "python first.py")
    assert [text for text in LINES if text and not text.startswith(tried)] == []
    for text in LINES:
        if text.startswith("hpcgpu"):
            doc_blocks.check_mention(text)
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) < 120
    first = "\n".join(text.splitlines()[:60])
    assert all(word in first for word in ("hpcgpu site list", 'site="delta", gpus=8', "hpcgpu plan", "hpcgpu doctor"))
    typed = ("make demo", "make slurm-up", "make slurm-shell", "`cat > first.py`", "Cluster(nodes=2", "python f")
    assert re.search(".*".join(map(re.escape, typed)), text, re.DOTALL)


def test_readme_plans_known_machines_as_shown() -> None:
    def run(*argv: str) -> str:
        # no site is taken for this machine's, and tables are not folded
        done = CliRunner(env={"HPCGPU_SITE": "", "COLUMNS": "200"}).invoke(hpcgpu, argv, catch_exceptions=False)
        assert done.exit_code == 0
        return str(done.output)

    sites = run(*line("hpcgpu site list")[1:])
    assert len(sites.splitlines()) == 1 + len(list((ROOT / "site_configs").glob("*.yaml")))
    plan = run(*line("hpcgpu plan ")[1:])
    assert "  9 ranks and 8 workers; rank 0 has the scheduler" in plan.splitlines()
    assert re.search(r"^  worker-3 .* NUMA 0, ", plan, re.M), "the page says that this site's nodes are documented"
    assert "(Vista does)" in (ROOT / "README.md").read_text()
    cost = run("plan", "--site", "vista", "--gpus", "8", "--account", "m0000", "--walltime", "01:00:00", "--no-ask")
    assert re.search(r"^  cost: about 8 SU ", cost, re.M)
