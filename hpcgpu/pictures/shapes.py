"""Boxes, lines of text and tiles of a picture, and their SVG. Lengths are in SVG user units (px)."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from xml.sax.saxutils import escape, quoteattr

GAP = 6
TAG = 20  # side of a worker's numbered square

# Advance widths in em of DejaVu Sans, the widest of the usual sans-serif fonts: what fits in it fits in all of them.
_EMS = dict.fromkeys(map(chr, range(32, 127)), 0.64)
_EMS |= dict.fromkeys(" ,.'iljIJ·", 0.33) | dict.fromkeys(":;|!/\\()[]ftr-", 0.43) | dict.fromkeys('"`*_', 0.52)
_EMS |= dict.fromkeys("ABCEFKPRSTVXYZ", 0.7) | dict.fromkeys("wOQGDNUH#&+<>=~^", 0.84) | dict.fromkeys("mMW@%", 1.0)
_OTHER = 1.05  # what is not ASCII may be as wide as it is high
_BOLD = 1.16
# Paul Tol's "light" scheme (SRON technical note 3.2), made to be told apart by colour-blind readers under dark text;
# then eight with the largest distance from these and each other in CIELAB as normal, deuteranopic, protanopic and
# tritanopic eyes see them (model of Machado et al., 2009). The number in each box has the same meaning without colour.
COLOURS = (
    *("#77AADD", "#EE8866", "#EEDD88", "#44BB99", "#FFAABB", "#99DDFF", "#BBCC33", "#AAAA00"),
    *("#8888EE", "#BBFFBB", "#AA88AA", "#EE6677", "#BB8833", "#AACC99", "#DDFFDD", "#779977"),
)
INK = "#1A1A1A"
FADED = "#5F5F5F"
_LINE, _PALE = "#8A8A8A", "#F1F1F1"
# fill, outline, its width, radius of the corners
_STYLES = {
    "package": ("#FAFAFA", "#444444", 1.5, 8),
    "node": ("#FFFFFF", _LINE, 1, 6),
    "unknown": ("#FFFFFF", _LINE, 1, 6),
    "core": ("#FFFFFF", _LINE, 1, 2),
    "gpu": ("#FFFFFF", "#333333", 1.2, 4),
    "port": ("#FFFFFF", INK, 2, 4),
    "port idle": (_PALE, "#777777", 1, 4),
    "memory": ("#FFFFFF", _LINE, 1, 4),
    "tag": ("#FFFFFF", "#333333", 0.8, 2),
}
# From a port to a GPU, by the kind of distance: width and dashes of a line.
_DISTANCES = ((4, "none"), (1.5, "none"), (2, "8 3"), (2, "6 3 2 3"), (2, "2 3"), (0, "none"))


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle; y grows downward."""

    x: float
    y: float
    width: float
    height: float

    @property
    def right(self) -> float:
        """The x of the right edge."""
        return self.x + self.width

    @property
    def bottom(self) -> float:
        """The y of the lower edge."""
        return self.y + self.height


@dataclass(frozen=True, slots=True)
class Text:
    """One line of text."""

    x: float  # of the anchor
    y: float  # of the base line
    text: str
    size: float = 11
    bold: bool = False
    anchor: str = "start"  # of the text; or middle, end

    @property
    def box(self) -> Box:
        """The area that the text covers, at most."""
        width = text_width(self.text, self.size, self.bold)
        left = self.x - {"start": 0.0, "middle": width / 2, "end": width}[self.anchor]
        return Box(left, self.y - 0.8 * self.size, width, self.size)


@dataclass(frozen=True, slots=True)
class Tile:
    """A box with its contents."""

    kind: str  # style and SVG class: package, node, core, gpu, port, memory, tag, row
    box: Box
    texts: tuple[Text, ...] = ()
    inside: tuple[Tile, ...] = ()
    workers: tuple[int, ...] = ()  # their colours fill the box
    tooltip: str = ""
    crossed: bool = False  # out of use


def text_width(text: str, size: float, bold: bool = False) -> float:
    """Return the greatest width of the text in any of the usual sans-serif fonts."""
    return sum(_EMS.get(c, _OTHER) for c in text) * size * (_BOLD if bold else 1.0)


def fit(text: str, width: float, size: float, bold: bool = False) -> str:
    """Return the text, cut with an ellipsis where it is wider than ``width``."""
    if text_width(text, size, bold) <= width:
        return text
    while text and text_width(text + "…", size, bold) > width:
        text = text[:-1]
    return text + "…"


def wrap(text: str, width: float, size: float, bold: bool = False) -> list[str]:
    """Break the text into lines no wider than ``width``, at blanks and commas; inside a word if nothing else fits."""
    lines = [""]
    for piece in re.findall(r"[^\s,]*[\s,]+|[^\s,]+", text):
        if text_width(lines[-1] + piece.rstrip(), size, bold) > width and lines[-1]:
            lines.append("")
        lines[-1] += piece
        while text_width(lines[-1].rstrip(), size, bold) > width and len(lines[-1]) > 1:
            last = lines[-1]
            cut = next(n for n in range(len(last) - 1, 0, -1) if n == 1 or text_width(last[:n], size, bold) <= width)
            lines[-1:] = [last[:cut], last[cut:]]
    return [line.rstrip() for line in lines]


def columns_for(width: float, smallest: float) -> int:
    """Return the number of tiles of at least this width that fit beside each other."""
    return max(1, int((width + GAP) // (smallest + GAP)))


def in_rows(
    makers: Sequence[Callable[[float, float, float], Tile]], x: float, y: float, width: float, columns: int
) -> tuple[Tile, ...]:
    """Return the tiles (each made at x, y with a width) in rows of equal width and, within a row, height."""
    out: list[Tile] = []
    each = math.floor((width - GAP * (columns - 1)) / columns)
    for start in range(0, len(makers), columns):
        row = [make(x + i * (each + GAP), y, each) for i, make in enumerate(makers[start : start + columns])]
        height = max(t.box.height for t in row)
        out += [replace(t, box=replace(t.box, height=height)) for t in row]
        y += height + GAP
    return tuple(out)


def tags(workers: Sequence[int], x: float, y: float, width: float) -> tuple[Tile, ...]:
    """Return the numbered squares of the workers, wrapped within the width."""
    columns = max(1, int(width // TAG))
    return tuple(
        Tile(
            "tag",
            box := Box(x + i % columns * TAG, y + i // columns * TAG, TAG - 2, TAG - 2),
            (Text(box.x + box.width / 2, box.y + 13, str(w), 11 if w < 100 else 8, anchor="middle"),),
            workers=(w,),
        )
        for i, w in enumerate(workers)
    )


def bottom(tiles: Sequence[Tile], otherwise: float) -> float:
    """Return the lowest edge of the tiles; ``otherwise`` without tiles."""
    return max((t.box.bottom for t in tiles), default=otherwise)


def walk(tiles: Sequence[Tile]) -> Iterator[Tile]:
    """Yield the tiles and all tiles inside them."""
    for tile in tiles:
        yield tile
        yield from walk(tile.inside)


def to_svg(title: str, paper: Tile) -> str:
    """Render a picture as a self-contained SVG 1.1."""
    width, height = _n(paper.box.width), _n(paper.box.height)
    size = f'width="{width}" height="{height}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" version="1.1" {size} viewBox="0 0 {width} {height}"',
        "  font-family=\"Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif\">",
        f"<title>{_escape(title)}</title>",
        f'<rect {size} fill="#FFFFFF"/>',
        *map(_text, paper.texts),
        *(line for tile in paper.inside for line in _tile(tile)),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _tile(tile: Tile) -> Iterator[str]:
    workers = f' data-workers="{" ".join(map(str, tile.workers))}"' if tile.workers else ""
    yield f"<g class={quoteattr(tile.kind + ' crossed' * tile.crossed)}{workers}>"
    if tile.tooltip:
        yield f"<title>{_escape(tile.tooltip)}</title>"
    yield from _shape(tile)
    for text in tile.texts:
        yield _text(text, FADED if tile.kind == "port idle" else INK)
    for inside in tile.inside:
        yield from _tile(inside)
    yield "</g>"


def _shape(tile: Tile) -> Iterator[str]:
    kind = tile.kind.removeprefix("sample ")
    box = tile.box
    if kind == "row":
        yield f'<path d="M{_n(box.x)} {_n(box.bottom)}h{_n(box.width)}" stroke="#CCCCCC"/>'
    if kind.startswith("distance "):
        width, dashes = _DISTANCES[int(kind.split()[1])]
        line = f'stroke="{INK}" stroke-width="{width}" stroke-dasharray="{dashes}"'
        yield f'<path d="M{_n(box.x)} {_n(box.y + box.height / 2)}h{_n(box.width)}" {line}/>'
    if kind not in _STYLES:
        return
    fill, line, width, radius = _STYLES[kind]
    if len(tile.workers) == 1:
        fill = COLOURS[tile.workers[0] % len(COLOURS)]
    elif tile.crossed:
        fill = _PALE
    if kind == "core":
        line = INK if tile.workers else "#AAAAAA"
    outline = f'rx="{radius}" stroke="{line}" stroke-width="{width}"'
    if kind == "port idle":
        outline += ' stroke-dasharray="4 3"'
    yield f'<rect {_box(box)} {outline} fill="{fill}"/>'
    if kind == "gpu" and len(tile.workers) > 1:
        each = box.width / len(tile.workers)
        for i, worker in enumerate(tile.workers):
            strip = Box(box.x + i * each, box.y, each, box.height)
            yield f'<rect class="strip" {_box(strip)} fill="{COLOURS[worker % len(COLOURS)]}"/>'
        yield f'<rect {_box(box)} {outline} fill="none"/>'
    if tile.crossed:
        across = f"M{_n(box.x)} {_n(box.y)}L{_n(box.right)} {_n(box.bottom)}"
        back = f"M{_n(box.right)} {_n(box.y)}L{_n(box.x)} {_n(box.bottom)}"
        yield f'<path class="cross" d="{across}{back}" stroke="#BDBDBD" stroke-width="1.5"/>'


def _text(text: Text, fill: str = INK) -> str:
    anchor = f' text-anchor="{text.anchor}"' if text.anchor != "start" else ""
    weight = ' font-weight="bold"' if text.bold else ""
    attributes = f'x="{_n(text.x)}" y="{_n(text.y)}" font-size="{_n(text.size)}"'
    return f'<text {attributes} fill="{fill}"{anchor}{weight}>{_escape(text.text)}</text>'


def _box(box: Box) -> str:
    return f'x="{_n(box.x)}" y="{_n(box.y)}" width="{_n(box.width)}" height="{_n(box.height)}"'


def _n(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _escape(text: str) -> str:
    """Escape text for XML; characters that XML 1.0 forbids, or that change the direction, become U+FFFD."""
    return escape("".join("\N{REPLACEMENT CHARACTER}" if unicodedata.category(c)[0] == "C" else c for c in text))
