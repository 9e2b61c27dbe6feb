"""Make the pictures of docs/pictures that show a notebook: a real JupyterLab in a real Chromium.

Run it where the tests run: ``.venv/bin/python scripts/screenshots.py``. It needs Chromium (``make system``) and a
minute. Look at what it has made.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))
import browser  # noqa: E402
import notebooks  # noqa: E402

PICTURES = ROOT / "docs" / "pictures"
THEMES = {"light": "JupyterLab Light", "dark": "JupyterLab Dark"}
SHOWN = {"cluster": notebooks.CLUSTER, "memory": notebooks.MEMORY, "refusal": notebooks.REFUSED}


def main() -> int:
    """Make them."""
    if browser.CHROMIUM is None:
        print("there is no Chromium: make system", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        browser.write_notebook(folder / "demo.ipynb", notebooks.cells())
        with browser.lab(folder) as url, browser.page(folder / "chromium") as page:
            page.size(1000, 3600)
            browser.open_notebook(page, f"{url}doc/tree/demo.ipynb")
            browser.run_cells(page, notebooks.END)
            page.wait_for(f"/Device memory: [1-9]/.test({browser.output(notebooks.CLUSTER)}.innerText)")
            for theme, name in THEMES.items():
                browser.change_theme(page, name)
                for what, cell in SHOWN.items():
                    if (what, theme) != ("refusal", "dark"):
                        page.picture(PICTURES / f"notebook-{what}-{theme}.png", browser.cell(cell), 1000, 3600)
    for path in sorted(PICTURES.glob("*.png")):
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1024:.0f} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
