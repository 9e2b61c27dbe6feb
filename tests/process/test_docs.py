"""The pages of docs/tutorial and docs/how-to: what is not marked otherwise runs as it stands there."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import doc_blocks
import pytest
import ranks
from doc_blocks import DOCS, Block
from paths import ROOT

LESSONS = runpy.run_path(str(ROOT / "scripts/notebooks.py"))["LESSONS"]  # test_lessons.py runs them
FOUND = {p: doc_blocks.blocks(p) for folder in ("tutorial", "how-to") for p in sorted((DOCS / folder).glob("*.md"))}
PAGES = {p: found for p, found in FOUND.items() if p.stem not in LESSONS and any(b.how == "run" for b in found)}


def program(block: Block, folder: Path) -> list[str]:
    if block.kind == "bash":
        return ["bash", "-euo", "pipefail", "-c", block.text]
    (folder / "block.py").write_text(block.text)
    return [sys.executable, "block.py"]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_a_page_runs_from_its_first_block_to_its_last(page: Path, tmp_path: Path) -> None:
    env = ranks.environment(PATH=f"{ranks.BIN}:/usr/bin:/bin", HPCGPU_SITE="")
    for block in PAGES[page]:
        if block.how == "file":
            (tmp_path / block.word).write_text(block.text)
        elif block.how == "run":
            argv = program(block, tmp_path)
            done = subprocess.run(
                argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=150, stdin=subprocess.DEVNULL
            )
            assert done.returncode == 0, f"{block.text}{done.stdout[-2000:]}{done.stderr[-2000:]}"
