"""The pages of docs: what is not marked otherwise runs as it stands there."""

from __future__ import annotations

import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import doc_blocks
import pytest
import ranks
from doc_blocks import Block
from paths import ROOT
from waiting import scaled

LESSONS = runpy.run_path(str(ROOT / "scripts/notebooks.py"))["LESSONS"]  # test_lessons.py runs them


def is_lesson(page: Path) -> bool:
    return page.parent.name == "tutorial" and page.stem in LESSONS


FOUND = {
    page: [block for block in doc_blocks.blocks(page) if block.kind in ("bash", "python")] for page in doc_blocks.PAGES
}
PAGES = {p: found for p, found in FOUND.items() if not is_lesson(p) and any(b.how == "run" for b in found)}


def program(block: Block, folder: Path) -> list[str]:
    if block.kind == "bash":
        return ["bash", "-euo", "pipefail", "-c", block.text]
    (folder / "block.py").write_text(block.text)
    return [sys.executable, "block.py"]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_a_page_runs_from_its_first_block_to_its_last(page: Path, tmp_path: Path) -> None:
    path = f"{ranks.BIN}:/usr/bin:/bin"
    env = ranks.environment(PATH=path, HPCGPU_SITE="")
    for block in PAGES[page]:
        if block.how == "file":
            (tmp_path / block.word).write_text(block.text)
        elif block.how == "run":
            if "lstopo " in block.text and not shutil.which("lstopo", path=path):
                pytest.skip("lstopo of hwloc is not installed")
            argv = program(block, tmp_path)
            done = subprocess.run(
                argv,
                cwd=tmp_path,
                env=env,
                capture_output=True,
                text=True,
                timeout=scaled(150),
                stdin=subprocess.DEVNULL,
            )
            assert done.returncode == 0, f"{block.text}{done.stdout[-2000:]}{done.stderr[-2000:]}"
