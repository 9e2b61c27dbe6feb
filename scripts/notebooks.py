"""The lessons of docs/tutorial as notebooks: text is Markdown, each block of Python a cell.

python scripts/notebooks.py build/notebooks
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "tutorial"
LESSONS = ("local-cluster", "memory", "schedulers", "spilling")
_BLOCK = re.compile(r"^```python\n(.*?)^```\n?", re.S | re.M)


def notebook(page: Path) -> nbformat.NotebookNode:
    """Return a page as a notebook."""
    cells, text = [], page.read_text()
    for i, part in enumerate(_BLOCK.split(text)):
        if part.strip():
            cells.append((new_code_cell if i % 2 else new_markdown_cell)(part.strip("\n")))
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"  # the same notebook whenever it is made
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return new_notebook(cells=cells, metadata={"kernelspec": kernel, "language_info": {"name": "python"}})


def main(folder: Path) -> None:
    """Write all of them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in LESSONS:
        nbformat.write(notebook(FOLDER / f"{name}.md"), folder / f"{name}.ipynb")
    print(f"{len(LESSONS)} notebooks in {folder}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
