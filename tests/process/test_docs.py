"""The pages of docs, and the docstrings of the classes that start a cluster here, run as they stand there.

SLURMGPUCluster's example is the README's: the lab runs that.
"""

import asyncio
import doctest
import re
import runpy
import shlex
import shutil
import sys
from pathlib import Path

import doc_blocks
import pytest
import ranks
from doc_blocks import Block
from nbclient import NotebookClient
from pages import line
from paths import ROOT
from waiting import scaled

import hpcgpu

NOTEBOOKS = runpy.run_path(str(ROOT / "scripts/notebooks.py"))
LESSONS = [NOTEBOOKS["FOLDER"] / f"{name}.md" for name in NOTEBOOKS["LESSONS"]]
FOUND = {page: [b for b in doc_blocks.blocks(page) if b.kind in ("bash", "python")] for page in doc_blocks.PAGES}
PAGES = {p: found for p, found in FOUND.items() if p not in LESSONS and any(b.how == "run" for b in found)}


# Subcommands that start no cluster, in lines that need no shell but for "> FILE": a process for each costs 0.3 CPU s.
PLAIN = re.compile(r"hpcgpu (?:plan|ps|site|template|topo|version)\b[^|&;<>$`]*(?:> [\w.-]+)?")


def program(block: Block, folder: Path) -> list[str]:
    if block.kind == "bash":
        return ["bash", "-euo", "pipefail", "-c", block.text]
    (folder / "block.py").write_text(block.text)
    return [sys.executable, "block.py"]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_a_page_runs_from_its_first_block_to_its_last(page: Path, tmp_path: Path) -> None:
    path = f"{ranks.BIN}:/usr/bin:/bin"
    for block in PAGES[page]:
        if block.how == "file":
            (tmp_path / block.word).write_text(block.text)
        elif block.how == "run" and all(PLAIN.fullmatch(line) for line in block.text.splitlines()):
            for line in block.text.splitlines():
                typed, _, file = line.partition(" > ")
                done = ranks.in_process(*shlex.split(typed, comments=True)[1:], cwd=tmp_path, HPCGPU_SITE="")
                assert done.returncode == 0, f"{line}{done.stdout[-2000:]}{done.stderr[-2000:]}"
                if file:
                    (tmp_path / file).write_text(done.stdout)
        elif block.how == "run":
            if "lstopo " in block.text and not shutil.which("lstopo", path=path):
                pytest.skip("lstopo of hwloc is not installed")
            argv = ["env", f"--chdir={tmp_path}", *program(block, tmp_path)]
            done = ranks.run_command(argv, {"PATH": path, "HPCGPU_SITE": ""}, scaled(150))
            assert done.returncode == 0, f"{block.text}{done.stdout[-2000:]}{done.stderr[-2000:]}"


@pytest.mark.parametrize("page", LESSONS, ids=lambda p: p.stem)
def test_a_lesson_runs_as_a_notebook(page: Path, tmp_path: Path) -> None:
    notebook = NOTEBOOKS["notebook"](page)
    client = NotebookClient(notebook, timeout=int(scaled(120)), resources={"metadata": {"path": str(tmp_path)}})
    asyncio.run(client.async_execute())  # raises with the traceback of the cell
    assert all(cell["execution_count"] for cell in notebook["cells"] if cell["cell_type"] == "code")


def test_the_docstring_of_the_local_cluster_runs() -> None:
    found = doctest.DocTestFinder(recurse=False).find(hpcgpu.LocalGPUCluster, "LocalGPUCluster", globs={})
    results = [doctest.DocTestRunner().run(test) for test in found]
    assert [(r.failed, r.attempted) for r in results] == [(0, 3)]


def test_the_docstring_of_the_runner_runs(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(doctest.script_from_examples(hpcgpu.GPURunner.__doc__))
    done = ranks.run_command([sys.executable, str(tmp_path / "script.py")])
    assert done.stdout == "3\n", done.stderr


@pytest.mark.parametrize("start", ["mpirun ", "hpcgpu run "])
def test_the_examples_of_the_readme_run(start: str) -> None:
    """Both are an SVD, the second on devices that do not hold it."""
    argv = ["env", f"--chdir={ROOT}", *line(start)]
    done = ranks.run_command(argv, {"PATH": f"{ranks.BIN}:/usr/bin:/bin"}, scaled(120))
    assert done.returncode == 0, done.stderr
    assert float(re.search(r"singular values of .*: largest relative difference (.+)", done.stdout)[1]) < 1e-12
    assert start == "mpirun " or re.search(r"^spilled: device_to_host [1-9].+, host_to_device [1-9]", done.stdout, re.M)
