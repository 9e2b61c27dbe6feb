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
    tried = ("git clone ADDRESS", "python3 -m venv", "sbatch ", "qsub ", "hpcgpu launch ", "mpirun ", "hpcgpu run ")
    tried += ("pip install ", "hpcgpu demo", "hpcgpu site list", "hpcgpu plan ", "hpcgpu doctor", "hpcgpu template")
    assert [text for text in LINES if text and not text.startswith(tried)] == []
    for text in LINES:
        if text.startswith("hpcgpu"):
            doc_blocks.check_mention(text)
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 110
    first = "\n".join(text.splitlines()[:65])
    assert all(word in first for word in ("hpcgpu site list", 'site="delta", gpus=8', "hpcgpu plan", "hpcgpu doctor"))
    typed = ("git clone", "pip install", "hpcgpu demo", "hpcgpu run --gpus sim:4x16MiB", "Cluster(nodes=2")
    assert re.search(".*".join(map(re.escape, typed)), text, re.DOTALL)


# What a newcomer looks for, and the page that has it.
ANSWERS = {
    "a known site": "how-to/sites.md",
    "an unknown site": "tutorial/real-site.md",
    "a notebook": "how-to/notebook.md",
    "dask-cuda": "coming-from/dask-cuda.md",
    "a full GPU": "explanation/memory.md",
    "workers that do not connect": "explanation/doctor.md",
    "speed": "benchmarks.md",
    "all ways to start": "how-to/start.md",
    "an installation for all": "how-to/operators.md",
}


def links(page: Path) -> set[Path]:
    """Return the files to which a page links."""
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    return {(page.parent / target).resolve() for target in targets}


@pytest.mark.parametrize("question", ANSWERS)
def test_answer_is_two_links_from_the_readme(question: str) -> None:
    first = links(ROOT / "README.md")
    second = {target for page in first if page.suffix == ".md" for target in links(page)}
    assert ROOT / "docs" / ANSWERS[question] in first | second


def test_index_has_the_headings_and_commands_of_the_help() -> None:
    rows = re.findall(r"^\| (\w.*?) \| .* \| `([^|]*)` \|$", (ROOT / "docs/index.md").read_text(), re.M)
    assert [(heading, tuple(names.split("`, `"))) for heading, names in rows] == list(hpcgpu.headings.items())


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
    assert "(Vista does)" in (ROOT / "docs/how-to/sites.md").read_text()
    cost = run("plan", "--site", "vista", "--gpus", "8", "--account", "m0000", "--walltime", "01:00:00", "--no-ask")
    assert re.search(r"^  cost: about 8 SU ", cost, re.M)
