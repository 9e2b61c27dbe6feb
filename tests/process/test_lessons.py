"""The lessons of docs/tutorial run as notebooks, in a kernel of their own, from the first cell to the last."""

from __future__ import annotations

import asyncio
import runpy
from pathlib import Path

import pytest
from nbclient import NotebookClient
from paths import ROOT
from waiting import scaled

NOTEBOOKS = runpy.run_path(str(ROOT / "scripts/notebooks.py"))


@pytest.mark.parametrize("name", NOTEBOOKS["LESSONS"])
def test_a_lesson_runs(name: str, tmp_path: Path) -> None:
    notebook = NOTEBOOKS["notebook"](NOTEBOOKS["FOLDER"] / f"{name}.md")
    client = NotebookClient(notebook, timeout=scaled(120), resources={"metadata": {"path": str(tmp_path)}})
    asyncio.run(client.async_execute())  # raises with the traceback of the cell
    assert all(cell["execution_count"] for cell in notebook["cells"] if cell["cell_type"] == "code")
