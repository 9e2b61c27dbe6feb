"""One table as text of any width, as HTML and as JSON."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hpcgpu.report import Column, Table

COLUMNS = (
    *(Column("name", kind="name"), Column("state", styles={"UP": "green"}), Column("size", "B", "number")),
    Column("why", kind="note", mark="-> "),
)
TABLE = Table(COLUMNS, [("a b", "UP", 1 << 20, ["x"]), ("c", "out\nof order", None, "")], "title", ["a note"])


def test_table_is_text_html_and_json() -> None:
    rows = [
        "name  state              size",
        "a b   UP              1.0 MiB",
        "    -> x",
        "c     out / of order        -",
    ]
    assert TABLE.to_text().splitlines() == ["title", *rows, "a note"]
    assert "\x1b[32mUP " in TABLE.to_text(colours=True)
    assert "\n    state  out / of\n           order\n" in TABLE.to_text(19)
    assert TABLE.to_json()[0] == {"name": "a b", "state": "UP", "size": 1 << 20, "why": ["x"]}
    assert '<td>a b<div class="dim">-&gt; x</div></td><td>UP</td><td>1.0 MiB</td>' in TABLE.to_html()


words = st.text("ab1,", min_size=1, max_size=12)
texts = st.lists(words, max_size=6).map(" ".join)


@given(st.lists(st.tuples(words, texts, st.none() | st.integers(0, 1 << 40), st.lists(texts))), st.integers(16, 120))
def test_table_fits_any_width_and_breaks_no_word(rows: list[tuple[str, str, int, list[str]]], width: int) -> None:
    text = Table(COLUMNS, rows).to_text(width)
    assert [line for line in text.splitlines() if len(line) > width and len(line.split()) > 1] == []
    shown = {word for row in rows for word in (row[0], *row[1].split(), *" ".join(row[3]).split())}
    assert shown <= set(text.split())
