"""Blocks of code, commands, names of options and of tests in the documentation are tried, and examples run."""

import doctest
import functools
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import dask
import distributed  # noqa: F401 - brings its part of dask's configuration
import doc_blocks
import pytest
import yaml
from click.testing import CliRunner
from pages import LINES, PAGES, blocks, line
from paths import PACKAGE, ROOT

import hpcgpu
from hpcgpu.cli import commands
from hpcgpu.config.layers import read_settings
from hpcgpu.config.migration import HINTS, ignored, translate
from hpcgpu.errors import ConfigError
from hpcgpu.model.settings import BY_NAME, options, user_name

# Blocks to read, not to type: output, pictures, files of a site or a configuration; Sphinx replaces two.
SHOWN = {"", "text", "diff", "yaml", "json", "{toctree}", "{eval-rst}"}
# All pages with commands, those of the folders too that have tests of their own; pytest leaves one in .pytest_cache.
TEXTS = [*sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("[!.]*/README.md"))]
TEXTS += [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]

# What a newcomer looks for: sites, notebooks, a full GPU, workers that do not connect, speed, and so on.
ANSWERS = {"how-to/sites", "how-to/notebook", "how-to/start", "how-to/operators", "tutorial/real-site", "benchmarks"}
OURS = {user_name(f) for f in options()} | set(hpcgpu.__all__)
ALIASES = {alias for f in options() for alias in f.metadata["aliases"]}
MEMORY = (ROOT / "docs/reference/memory-options.md").read_text()
NAMING = [*sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("*.md")), *sorted((ROOT / "tests").rglob("*.md"))]
# Pages with tables of faults, and where these begin.
FAULTS = {
    "docs/explanation/faults.md": "# ",
    "tests/README.md": "## Background work",
    "tests/data/topology/README.md": "## Other people's machines",
}
# A file, a test in it, or `::name`: another test of the file before it, in the same row or paragraph.
NAMED = re.compile(r"`((?:tests/)?(?:[\w*]+/)*test_[\w*]+\.py)?(?:::(\w+))?`")
# Those that start a cluster run in tests/process/test_docs.py.
CLUSTERS = {hpcgpu._HOMES[name] for name in ("SLURMGPUCluster", "LocalGPUCluster", "GPURunner")}
# Found by their text: nothing is imported for it.
FILES = [path for path in PACKAGE.rglob("*.py") if re.search(r"^ *>>> ", path.read_text(), re.MULTILINE)]
MODULES = {".".join(p.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__") for p in FILES}


@pytest.mark.parametrize("page", doc_blocks.PAGES, ids=lambda page: page.stem)
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
    readme = (ROOT / "README.md").read_text()
    assert re.findall("`(make [a-z]+)", readme)[:2] == ["make demo", "make test"]
    assert len(readme.splitlines()) <= 110


ANSWERS |= {"coming-from/dask-cuda", "explanation/memory", "explanation/doctor"}


def links(page: Path) -> set[Path]:
    """Return the files to which a page links."""
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    return {(page.parent / target).resolve() for target in targets}


def test_answers_are_two_links_from_the_readme() -> None:
    first = links(ROOT / "README.md")
    second = {target for page in first if page.suffix == ".md" for target in links(page)}
    assert {ROOT / "docs" / f"{answer}.md" for answer in ANSWERS} <= first | second


def test_index_has_the_headings_and_commands_of_the_help() -> None:
    rows = re.findall(r"^\| (\w.*?) \| .* \| `([^|]*)` \|$", (ROOT / "docs/index.md").read_text(), re.M)
    assert [(heading, tuple(names.split("`, `"))) for heading, names in rows] == list(commands.hpcgpu.headings.items())


def test_readme_plans_known_machines_as_shown() -> None:
    def run(*argv: str) -> str:
        # no site is taken for this machine's, and tables are not folded
        plain = CliRunner(env={"HPCGPU_SITE": "", "COLUMNS": "200"})
        done = plain.invoke(commands.hpcgpu, argv, catch_exceptions=False)
        assert done.exit_code == 0
        return str(done.output)

    sites = run(*line("hpcgpu site list")[1:])
    assert len(sites.splitlines()) == 1 + len(list((ROOT / "site_configs").glob("*.yaml")))
    plan = run(*line("hpcgpu plan ")[1:])
    assert "  9 ranks and 8 workers; rank 0 has the scheduler" in plan.splitlines()
    assert re.search(r"^  worker-3 .* NUMA 0, ", plan, re.M), "the page says that this site's nodes are documented"


# --- the pages for users of other tools, and the table of memory options


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


def test_page_for_dask_cuda_has_its_modules() -> None:
    """A module, unlike a class, cannot say what replaces it when it is imported from hpcgpu."""
    shown = {name for there, *_ in rows(PAGES["dask-cuda"]) for name in quoted(there)}
    assert {f"dask_cuda.{name}" for name in ("CUDAWorker", "initialize", "utils", "explicit_comms")} <= shown


def test_no_text_installs_hpcgpu_from_an_index() -> None:
    """There it is a stranger's package, or none."""
    sources = [*PACKAGE.rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    advice = re.compile(r"pip install (?:[-\w=]+ )*['\"]?hpcgpu\b(?!-)")
    assert [str(path) for path in sources if advice.search(path.read_text())] == []
    assert advice.search("pip install 'hpcgpu[ucx]'")


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


# --- each row of a table of faults names its test


def named(text: str) -> Iterator[tuple[str, str]]:
    """File and name of each test that a document names; either may be empty."""
    for block in re.split(r"\n\n|\n(?=\|)", text):
        path = ""
        for found in NAMED.finditer(block):
            path = found[1] or path
            if found[1] or found[2]:
                yield path, found[2] or ""


@functools.cache
def texts() -> dict[Path, str]:
    return {file: file.read_text() for file in (ROOT / "tests").rglob("test_*.py")}


def there(path: str, name: str) -> bool:
    """Whether some file of tests is so called, with its folders or without, and has such a test."""
    found = [text for file, text in texts().items() if file.match(path)] if path else []
    return any(not name or re.search(rf"^(async )?def {name}\(", text, re.M) for text in found)


def test_tests_that_are_named_exist() -> None:
    assert [(page, test) for page in NAMING for test in named(page.read_text()) if not there(*test)] == []


@pytest.mark.parametrize("page", FAULTS)
def test_every_row_names_a_test(page: str) -> None:
    text = (ROOT / page).read_text().partition(FAULTS[page])[2]
    rows = [line for line in text.splitlines() if re.match(r"\| (?!fault \||fault in \||seen \|)", line)]
    assert [row for row in rows if not re.search(r"`tests/[\w/]+\.py::\w+`[^|]*\|$", row)] == []
    assert len(rows) >= 10


# --- examples in docstrings


@pytest.mark.parametrize("name", sorted(MODULES - CLUSTERS))
def test_examples_of_docstrings(name: str) -> None:
    failed, tried = doctest.testmod(importlib.import_module(name))
    assert tried
    assert not failed


def test_clusters_examples_are_known() -> None:
    """A module of this list has examples, so that none is left out by its old name."""
    assert CLUSTERS <= MODULES
