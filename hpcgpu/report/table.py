"""One table for all that people and programs see, as text, HTML and JSON; pages for notebooks."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from hpcgpu.units import format_bytes

# More rows are too many to read; to_json() has all.
_MOST_ROWS = 64
_WIDEST = 1 << 12  # of text without a limit: a longer line is broken
# Stands for a text below a row while rich lays the table out; of Unicode's private use, one column wide.
_BELOW = "\ue000"
# In the colours of the notebook, light or dark: text in the current colour, lines in transparent grey.
_STYLE = """<style>
.hpcgpu { font-size: 13px; line-height: 1.4; max-width: 1000px; overflow-x: auto }
.hpcgpu h3 { margin: 0; font-size: 16px } .hpcgpu p { margin: 2px 0 6px }
.hpcgpu .dim { opacity: .65 } .hpcgpu .bad { color: #d93a2b; font-weight: 600 }
.hpcgpu .dot { display: inline-block; width: 9px; height: 9px; border-radius: 50%; margin-right: 6px }
.hpcgpu table { border-collapse: collapse; margin: 4px 0 8px; width: auto }
.hpcgpu th, .hpcgpu td { text-align: left !important; vertical-align: top; padding: 3px 14px 3px 0; border: 0;
  border-bottom: 1px solid rgba(127,127,127,.25); background: none;
  font-size: 12px; overflow-wrap: anywhere; white-space: normal }
.hpcgpu th { font-weight: 600; opacity: .75 }
.hpcgpu .fix { white-space: nowrap } .hpcgpu a { color: var(--jp-content-link-color, #3b82c4) }
.hpcgpu .track { position: relative; height: 8px; min-width: 120px; border-radius: 3px; margin-top: 4px;
  background: rgba(127,127,127,.22); overflow: hidden }
.hpcgpu .track i { position: absolute; top: 0; bottom: 0; display: block }
.hpcgpu .track b { position: absolute; top: 0; bottom: 0; width: 2px; background: currentColor; opacity: .8 }
.hpcgpu summary { cursor: pointer; font-weight: 600; margin: 4px 0 }
.hpcgpu .key { font-size: 12px; margin: 0 0 8px } .hpcgpu .key span { margin-right: 16px; white-space: nowrap }
.hpcgpu .key em { display: inline-block; width: 12px; height: 8px; border-radius: 2px; margin-right: 6px;
  background: currentColor; opacity: .85 }
.hpcgpu .key em.light { opacity: .35 } .hpcgpu .key em.mark { width: 2px; border-radius: 0; height: 11px;
  vertical-align: -1px }
.hpcgpu pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: 12px; margin: 0 }
</style>"""


@dataclass(frozen=True, slots=True)
class Bar:
    """A cell with a level: managed bytes in full colour, others in use in a lighter one, and a mark at a limit."""

    text: str
    colour: str
    managed: int
    used: int
    end: int  # 0: no bar
    limit: int | None = None


Value = str | int | float | None | Bar | Sequence[str]


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its name, the unit of its numbers, and the kind of its cells."""

    name: str
    unit: str = ""  # B: bytes, shown with a prefix
    # text: folded at blanks where room is short; prose: also within words; name: not folded; number: to the right, None
    # is unknown; path: another one in each row. note, fault: some texts below the row, or none
    kind: str = "text"
    mark: str = ""  # before each text below a row
    styles: Mapping[str, str] = field(default_factory=dict)  # rich's, of some of its texts

    @property
    def is_below(self) -> bool:
        """True if its texts are below the row."""
        return self.kind in ("note", "fault")

    def text(self, value: Value) -> str:
        """Format a cell; "-" if it is unknown or empty."""
        if isinstance(value, Bar):
            return value.text
        if self.unit == "B" and isinstance(value, int):
            return format_bytes(value)
        return _one_line(str(value)) if value not in (None, "") else "-"

    def texts(self, value: Value) -> list[str]:
        """Return the lines below a row."""
        texts = (value,) if isinstance(value, str) else value
        return [f"{self.mark}{_one_line(text)}" for text in texts if text]  # type: ignore[union-attr]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of values; notes are lines below all of them."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Value]]
    title: str = ""
    notes: Sequence[str] = ()

    def to_text(self, width: int = 0, *, colours: bool = False) -> str:
        """Format for a terminal of ``width`` columns, 0: unlimited; in a narrow one each row is a list."""
        from rich.console import Console
        from rich.text import Text

        if len(self.rows) > _MOST_ROWS:
            return self.folded().to_text(width, colours=colours)
        console = Console(
            width=width or _WIDEST,
            color_system="standard" if colours else None,
            force_terminal=colours,
            force_jupyter=False,
            highlight=False,
        )
        with console.capture() as capture:
            console.print(self._laid_out(), crop=False)
        laid_out = [line.rstrip() for line in capture.get().splitlines()] if self.rows else []
        parts = [fold(self.title.splitlines(), width)]
        if width and any(Text.from_ansi(line).cell_len > width for line in laid_out):
            parts += (self._as_list(row, width) for row in self.rows)
        else:
            below = (f"    {text}" for row in self.rows for _, text in self._below(row))
            parts += (fold([next(below, "")], width) if _BELOW in line else f"{line}\n" for line in laid_out)
        return "".join((*parts, fold(self.notes, width)))

    def html(self) -> str:
        """Render as a part of a page, without empty columns."""
        if len(self.rows) > _MOST_ROWS:
            return self.folded().html()
        heads = [(i, c) for i, c in enumerate(self.columns) if not c.is_below]
        shown = [(i, c) for i, c in heads if any(c.text(row[i]) != "-" for row in self.rows)]
        top = "".join(f"<th>{html.escape(c.name)}</th>" for _, c in shown)
        body = "".join(
            f"<tr>{''.join(self._td(c, row[i], row if i == 0 else ()) for i, c in shown)}</tr>" for row in self.rows
        )
        return "".join(
            (
                f"<p>{html.escape(self.title)}</p>" if self.title else "",
                f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>" if self.rows else "",
                *(f'<p class="dim">{html.escape(note)}</p>' for note in self.notes),
            )
        )

    def folded(self) -> Table:
        """Return a table that stays on a screen.

        Rows that differ in nothing but name and path are one, faults come first, and of more rows the last one, which
        may be a sum, is kept.
        """
        unique = {0, *(i for i, c in enumerate(self.columns) if c.kind == "path")}
        faults = [i for i, c in enumerate(self.columns) if c.kind == "fault"]
        alike: dict[str, list[Sequence[Value]]] = {}
        for row in self.rows:
            alike.setdefault(repr([value for i, value in enumerate(row) if i not in unique]), []).append(row)
        rows = [
            (f"{first[0]} and {len(others)} alike", *("" if i in unique else v for i, v in enumerate(first) if i))
            if others
            else first
            for first, *others in alike.values()
        ]
        rows.sort(key=lambda row: not any(row[i] for i in faults))
        more = len(rows) - _MOST_ROWS
        notes = [f"and {more} more rows: to_json() has all", *self.notes] if more > 0 else self.notes
        return replace(self, rows=[*rows[: _MOST_ROWS - 1], rows[-1]] if more > 0 else rows, notes=notes)

    def to_json(self) -> list[dict[str, Any]]:
        """Return the rows as plain data by the names of the columns."""
        return [
            {c.name: v.text if isinstance(v, Bar) else v for c, v in zip(self.columns, row, strict=True)}
            for row in self.rows
        ]

    def _laid_out(self) -> Any:  # rich's table
        from rich.cells import cell_len
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        for i, c in enumerate(self.columns):
            if c.is_below:
                continue
            justify: Literal["left", "right"] = "right" if c.kind == "number" else "left"
            texts = [] if c.kind == "prose" else [c.text(row[i]) for row in self.rows]
            parts = [*c.name.split(), *(texts if c.kind in ("name", "number") else " ".join(texts).split())]
            least = max(map(cell_len, parts), default=1)
            table.add_column(Text(c.name), justify=justify, overflow="fold", min_width=least)
        for row in self.rows:
            cells = [(c, c.text(v)) for c, v in zip(self.columns, row, strict=True) if not c.is_below]
            table.add_row(*(Text(text, style=c.styles.get(text, "")) for c, text in cells))
            for _ in self._below(row):
                table.add_row(_BELOW)
        return table

    def _below(self, row: Sequence[Value]) -> Iterator[tuple[Column, str]]:
        """Yield the texts below a row, each with its column."""
        for column, texts in zip(self.columns, row, strict=True):
            if column.is_below:
                yield from ((column, text) for text in column.texts(texts))

    def _as_list(self, row: Sequence[Value], width: int) -> str:
        """Format a row as a list of its cells, without the empty ones."""
        (_, name), *others = [(c, c.text(v)) for c, v in zip(self.columns, row, strict=True) if not c.is_below]
        indent = max((len(c.name) for c, _ in others), default=0) + 2
        lines = [f"    {c.name:<{indent}}{text}" for c, text in others if text != "-"]
        below = [f"    {text}" for _, text in self._below(row)]
        return fold([name], width) + fold(lines, width, indent) + fold(below, width)

    def _td(self, column: Column, value: Value, row: Sequence[Value]) -> str:
        """Render a cell; the first one of a row has the texts below it."""
        css = {"fault": "bad", "note": "dim"}
        texts = self._below(row) if row else ()
        below = "".join(f'<div class="{css[c.kind]}">{html.escape(text)}</div>' for c, text in texts)
        text = column.text(value)
        cell = "" if text == "-" and column.kind != "number" else html.escape(text)
        if isinstance(value, Bar):
            cell = f"<span>{cell}</span>{_track(value)}"
        return f"<td{' class=fix' * (column.kind == 'name' and not below)}>{cell}{below}</td>"


class Shown:
    """Shows its :attr:`table` in a terminal and in a notebook."""

    __slots__ = ()

    @property
    def table(self) -> Table:
        """The table."""
        raise NotImplementedError

    def __str__(self) -> str:
        return self.table.to_text()

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return page(self.table.html())


class Explanation(str):
    """A text of several lines that notebooks and prompts show without quotes and escapes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return page(preformatted(self))


def page(*parts: str) -> str:
    """Join parts below each other, with their style."""
    return f'{_STYLE}<div class="hpcgpu">{"".join(parts)}</div>'


def preformatted(text: str) -> str:
    """Render a text of several lines as it is."""
    return f"<pre>{html.escape(text)}</pre>"


def fold(lines: Sequence[str], width: int, more: int = 4) -> str:
    """Fold lines at blanks into ``width`` columns, 0: unlimited; continuation lines are indented by ``more``."""
    out = []
    for line in lines:
        if width and len(line) > width:
            indent = " " * (len(line) - len(line.lstrip()) + more)
            out += textwrap.wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        else:
            out.append(line)
    return "".join(f"{line}\n" for line in out)


def _one_line(text: str) -> str:
    """Join a text into one line; messages of a batch system may have several."""
    return " / ".join(" ".join(line.split()) for line in text.splitlines() if line.strip()) if "\n" in text else text


def _track(bar: Bar) -> str:
    def percent(size: int) -> float:
        return min(100.0, 100.0 * size / bar.end)

    if not bar.end:
        return ""
    has_mark = bar.limit and bar.limit != bar.end
    mark = f'<b style="left: calc({percent(bar.limit or 0):.1f}% - 2px)"></b>' if has_mark else ""
    return (
        f'<div class="track"><i style="width: {percent(bar.used):.1f}%; background: {bar.colour}; opacity: .45"></i>'
        f'<i style="width: {percent(bar.managed):.1f}%; background: {bar.colour}"></i>{mark}</div>'
    )
