"""The picture of a node as SVG: its parts, coloured by worker."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape, quoteattr

from hpcgpu.model import Binding, Topology
from hpcgpu.pictures.layout import WIDTH, lay_out
from hpcgpu.pictures.numa_contents import node_of
from hpcgpu.pictures.shapes import Box, Text, Tile

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


def render_svg(topology: Topology, bindings: Sequence[Binding], names: Sequence[str] = ()) -> str:
    """Render a node and its workers (``names``, or their numbers) as a self-contained SVG 1.1; or ValueError."""
    node = node_of(topology, bindings, names)
    picture = lay_out(node)
    size = f'width="{WIDTH}" height="{_n(picture.height)}" viewBox="0 0 {WIDTH} {_n(picture.height)}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" version="1.1" {size}',
        "  font-family=\"Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif\">",
        f"<title>{_escape(node.title)}</title>",
        f'<rect width="{WIDTH}" height="{_n(picture.height)}" fill="#FFFFFF"/>',
        *(_text(t) for t in picture.texts),
        *(line for tile in picture.tiles for line in _tile(tile)),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def colour(worker: int) -> str:
    """Return the worker's fill; sixteen colours repeat."""
    return COLOURS[worker % len(COLOURS)]


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
        fill = colour(tile.workers[0])
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
            yield f'<rect class="strip" {_box(strip)} fill="{colour(worker)}"/>'
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
