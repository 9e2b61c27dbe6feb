"""Safe parsing of untrusted XML: no entity declarations, no external files, limited depth."""

from __future__ import annotations

import contextlib
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from typing import TypeVar
from xml.parsers import expat

from hpcgpu.errors import ParseError
from hpcgpu.model import CpuSet
from hpcgpu.topology.pci import printable

# Recorded files are at most 20 levels deep; readers below here may recurse.
_MAX_DEPTH = 200
# 8192 PUs, the most that Linux is built for, are 2815 characters.
_MAX_MASK = 8192
_MASK = re.compile(r"(?:0x)?[0-9a-fA-F]{0,8}(?:,(?:0x)?[0-9a-fA-F]{0,8})*")
_T = TypeVar("_T")


class Misread(ValueError):
    """An unreadable value of an element; :func:`reading` makes a ParseError of it, with its line."""

    def __init__(self, element: ET.Element, name: str, expected: str) -> None:
        super().__init__(expected)
        self.element, self.name, self.expected = element, name, expected


@contextlib.contextmanager
def reading(text: str, format_: str) -> Iterator[ET.Element]:
    """Parse XML, called ``format_`` in errors, into its root; a :class:`Misread` in the block gets its line.

    ParseError if the XML is malformed, nested too deeply, or unsafe, and for a Misread.
    """
    root, lines = _tree(text, format_)
    try:
        yield root
    except Misread as error:
        raise _misread(text, lines, error) from error


def _tree(text: str, format_: str) -> tuple[ET.Element, dict[ET.Element, int]]:
    """Return the root, and the line of each element."""
    builder, lines, depth = ET.TreeBuilder(), dict[ET.Element, int](), 0
    parser = expat.ParserCreate()

    def refused(why: str) -> ParseError:
        return ParseError(f"not {format_}: {why}", evidence=text[:400])

    # hwloc's own declaration is <!DOCTYPE topology SYSTEM "hwloc2.dtd">. Expat does not load it.
    def doctype(_name: str, _system: str | None, _public: str | None, has_declarations: int) -> None:
        if has_declarations:
            raise refused("it declares entities or other markup of its own; topology files never do")

    def skipped(name: str, _is_parameter: int) -> None:
        raise refused(f"undefined entity {name[:40]}")

    def start(tag: str, attributes: dict[str, str]) -> None:
        nonlocal depth
        depth += 1
        if depth > _MAX_DEPTH:
            raise refused(f"elements are nested more than {_MAX_DEPTH} deep")
        lines[builder.start(tag, attributes)] = parser.CurrentLineNumber

    def end(tag: str) -> None:
        nonlocal depth
        depth -= 1
        builder.end(tag)

    parser.StartDoctypeDeclHandler, parser.SkippedEntityHandler = doctype, skipped
    parser.StartElementHandler, parser.EndElementHandler = start, end
    try:
        parser.Parse(text.removeprefix("\ufeff"), True)  # as UTF-8, whatever the text's declaration says
    except expat.ExpatError as e:
        at = f"line {e.lineno} of {text.count(chr(10)) + 1}"
        raise ParseError(f"not {format_}, or cut off: {expat.ErrorString(e.code)}, {at}", evidence=text[:400]) from e
    except UnicodeError as e:
        raise refused("it has characters that are not text") from e
    return builder.close(), lines


def read(element: ET.Element, name: str, convert: Callable[[str], _T], expected: str, absent: str = "") -> _T:
    """Convert an element's attribute; ``absent`` is used if it is missing or "". Raises Misread after a ValueError."""
    try:
        return convert(element.get(name) or absent)
    except ValueError as e:
        raise Misread(element, name, expected) from e


def whole(element: ET.Element, name: str, absent: str = "0") -> int:
    """Return an attribute that is a whole number."""
    return read(element, name, _whole, "a whole number", absent)


def count(element: ET.Element, name: str) -> int:
    """Return an attribute that is a size or an index; 0 if it is missing."""
    if (number := read(element, name, _whole, "a whole number from 0", "0")) < 0:
        raise Misread(element, name, "a whole number from 0")
    return number


def cpuset(element: ET.Element, name: str) -> CpuSet:
    """Return an attribute that is a mask; empty if it is missing."""
    return read(element, name, mask, "a mask such as 0x00000001,0x0000ffff", "0x0")


def word(element: ET.Element, name: str) -> str:
    """Return an attribute as one line of printable text."""
    return printable(element.get(name) or "")


def _misread(text: str, lines: dict[ET.Element, int], error: Misread) -> ParseError:
    """Return the error for a value, with its line, the value, and what was expected."""
    element = error.element
    value = printable(element.get(error.name) or "")
    had = f"{error.name}={value[:40]!r}" if error.name in element.attrib else f"no {error.name}"
    kind = element.get("type") or element.get("name") or ""
    description = printable(f"<{element.tag[:40]} {kind[:40]}>" if kind else f"<{element.tag[:40]}>")
    return ParseError(f"line {lines[element]}: {description} has {had}; expected {error.expected}", evidence=text[:400])


def _whole(text: str) -> int:
    if not re.fullmatch(r"-?[0-9]{1,19}", text.strip(), re.ASCII):
        raise ValueError(text[:40])
    return int(text)


def mask(text: str) -> CpuSet:
    """Parse a mask of 32-bit words, most significant first: ``0x1,0x0000ffff``, ``1,0000ffff``; or ParseError."""
    if len(text) > _MAX_MASK or not _MASK.fullmatch(text.strip()):
        raise ParseError(f"{text[:40]!r} is not a mask such as 0x00000001,0x0000ffff", evidence=text[:400])
    return CpuSet.from_mask(text.strip())
