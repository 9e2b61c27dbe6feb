"""Safe parsing of untrusted XML: no entity declarations, no external files, limited depth."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
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
_SPACE = re.compile(r"[ \t\r\n]+")
_NAME = re.compile(r"<([A-Za-z_][\w.:-]*)")
# hwloc's own is <!DOCTYPE topology SYSTEM "hwloc2.dtd">. Expat does not load it.
_LITERAL = r"""(?:"[^"<>]*"|'[^'<>]*')"""
_DOCTYPE = re.compile(
    rf"""<!DOCTYPE\s+[^\s\[\]<>"']+(?:\s+(?:SYSTEM|PUBLIC\s+{_LITERAL})\s+{_LITERAL})?\s*>""", re.ASCII
)
_SKIPPED = (("<?", "?>"), ("<!--", "-->"))
_T = TypeVar("_T")


class Misread(ValueError):
    """An unreadable value of an element; :func:`misread` makes a ParseError with its line."""

    def __init__(self, element: ET.Element, name: str, expected: str) -> None:
        super().__init__(expected)
        self.element, self.name, self.expected = element, name, expected


def root_name(text: str) -> str:
    """Return the name of the first element, from the prolog alone, or ""; ParseError for a declaration of entities."""
    at = len(text) - len(text.removeprefix("\ufeff"))
    while True:
        if space := _SPACE.match(text, at):
            at = space.end()
        if text.startswith("<!DOCTYPE", at):
            match = _DOCTYPE.match(text, at)
            if match is None:
                raise ParseError(
                    "this XML declares entities or other markup of its own; topology files never do, so it is not read",
                    evidence=text[:400],
                )
            at = match.end()
        elif mark := next((m for m in _SKIPPED if text.startswith(m[0], at)), None):
            end = text.find(mark[1], at + len(mark[0]))
            if end < 0:
                return ""
            at = end + len(mark[1])
        else:
            name = _NAME.match(text, at)
            return name[1] if name else ""


def parse(text: str, format_: str) -> ET.Element:
    """Parse XML, called ``format_`` in errors, into its root; ParseError if malformed, nested too deeply, or unsafe."""
    root_name(text)
    try:
        # A str is parsed as UTF-8 whatever its declaration says: no encoding can hide a declaration from root_name.
        root = ET.fromstring(text.removeprefix("\ufeff"))
    except ET.ParseError as e:
        at = f"line {e.position[0]} of {text.count(chr(10)) + 1}"
        raise ParseError(f"not {format_}, or cut off: {expat.ErrorString(e.code)}, {at}", evidence=text[:400]) from e
    except UnicodeError as e:
        raise ParseError(f"not {format_}: it has characters that are not text", evidence=text[:400]) from e
    level, depth = [root], 0
    while level:
        depth += 1
        if depth > _MAX_DEPTH:
            raise ParseError(f"not {format_}: elements are nested more than {_MAX_DEPTH} deep", evidence=text[:400])
        level = [child for element in level for child in element]
    return root


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


def misread(text: str, root: ET.Element, error: Misread) -> ParseError:
    """Return the error for a value, with its line, the value, and what was expected."""
    element = error.element
    value = printable(element.get(error.name) or "")
    had = f"{error.name}={value[:40]!r}" if error.name in element.attrib else f"no {error.name}"
    at = _line_of(text, next(i for i, e in enumerate(root.iter()) if e is element))
    kind = element.get("type") or element.get("name") or ""
    description = f"<{element.tag[:40]} {kind[:40]}>" if kind else f"<{element.tag[:40]}>"
    return ParseError(f"line {at}: {printable(description)} has {had}; expected {error.expected}", evidence=text[:400])


def _line_of(text: str, position: int) -> int:
    """Return the line of the element at this position in the order of the document."""
    left, line = position, 0
    parser = expat.ParserCreate()

    def start(_name: str, _attributes: dict[str, str]) -> None:
        nonlocal left, line
        line = parser.CurrentLineNumber if left == 0 else line
        left -= 1

    parser.StartElementHandler = start
    parser.Parse(text.removeprefix("\ufeff"), True)
    return line


def _whole(text: str) -> int:
    if not re.fullmatch(r"-?[0-9]{1,19}", text.strip(), re.ASCII):
        raise ValueError(text[:40])
    return int(text)


def mask(text: str) -> CpuSet:
    """Parse a mask of 32-bit words, most significant first: ``0x1,0x0000ffff``, ``1,0000ffff``; or ParseError."""
    if len(text) > _MAX_MASK or not _MASK.fullmatch(text.strip()):
        raise ParseError(f"{text[:40]!r} is not a mask such as 0x00000001,0x0000ffff", evidence=text[:400])
    return CpuSet.from_mask(text.strip())
