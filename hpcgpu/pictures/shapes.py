"""Boxes, lines of text and tiles, the elements of a picture's layout. Lengths are in SVG user units (px)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

GAP = 6
TAG = 20  # side of a worker's numbered square

# Advance widths in em of DejaVu Sans, the widest of the usual sans-serif fonts: what fits in it fits in all of them.
_EMS = dict.fromkeys(map(chr, range(32, 127)), 0.64)
_EMS |= dict.fromkeys(" ,.'iljIJ·", 0.33) | dict.fromkeys(":;|!/\\()[]ftr-", 0.43) | dict.fromkeys('"`*_', 0.52)
_EMS |= dict.fromkeys("ABCEFKPRSTVXYZ", 0.7) | dict.fromkeys("wOQGDNUH#&+<>=~^", 0.84) | dict.fromkeys("mMW@%", 1.0)
_OTHER = 1.05  # what is not ASCII may be as wide as it is high
BOLD = 1.16


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
    return sum(_EMS.get(c, _OTHER) for c in text) * size * (BOLD if bold else 1.0)


def fit(text: str, width: float, size: float, bold: bool = False) -> str:
    """Return the text, cut with an ellipsis where it is wider than ``width``."""
    if text_width(text, size, bold) <= width:
        return text
    while text and text_width(text + "…", size, bold) > width:
        text = text[:-1]
    return text + "…"


def wrap(text: str, width: float, size: float) -> list[str]:
    """Break the text into lines no wider than ``width``, at blanks and commas; inside a word if nothing else fits."""
    lines = [""]
    for piece in re.findall(r"[^\s,]*[\s,]+|[^\s,]+", text):
        if text_width(lines[-1] + piece.rstrip(), size) > width and lines[-1]:
            lines.append("")
        lines[-1] += piece
        while text_width(lines[-1].rstrip(), size) > width and len(lines[-1]) > 1:
            last = lines[-1]
            cut = next(n for n in range(len(last) - 1, 0, -1) if n == 1 or text_width(last[:n], size) <= width)
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
