"""Open a page of the dashboard and print what it holds: ``python bokeh_page.py URL CONDITION``."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
from bokeh.client import pull_session
from bokeh.models import ColumnDataSource, DataTable, Div, Plot

LIMIT_S = 60


def look(url: str, session_id: str) -> dict[str, Any]:
    """Return what the page holds now; of columns that several sources have, that of the table."""
    with pull_session(url=url, session_id=session_id) as session:
        document = session.document
        tables = [table.source for table in document.select({"type": DataTable})]
        data: dict[str, Any] = {}
        for source in (*document.select({"type": ColumnDataSource}), *tables):
            data |= source.data
        texts = "\n".join(div.text for div in document.select({"type": Div}))
        return {"data": data, "texts": texts, "titles": [str(p.title.text) for p in document.select({"type": Plot})]}


def main(url: str, condition: str) -> None:
    session = pull_session(url=url)
    end = time.monotonic() + LIMIT_S
    while not eval(condition, dict(content := look(url, session.id))):
        assert time.monotonic() < end, (condition, content)
        time.sleep(0.3)
    json.dump(content, sys.stdout, default=lambda v: v.tolist() if isinstance(v, np.ndarray) else str(v))


if __name__ == "__main__":
    main(*sys.argv[1:])
