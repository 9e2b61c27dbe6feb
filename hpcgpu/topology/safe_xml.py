"""Safe parsing of untrusted XML: no entity declarations, no external files, limited depth."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from typing import TypeVar
from xml.parsers import expat

from hpcgpu.errors import ParseError
from hpcgpu.model import CpuSet
from hpcgpu.topology.text import printable

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
    """A value of an element cannot be read; :func:`misread` says so with its line."""

    def __init__(self, element: ET.Element, name: str, expected: str) -> None:
        super().__init__(expected)
        self.element, self.name, self.expected = element, name, expected


def root_name(text: str) -> str:
    """Return the name of the first element, from the prolog alone; empty if there is none.

    Raises
    ------
    ParseError
        A document type with declarations of its own: entities that grow or name files, or defaults
        that grow. Nobody's topology has them.

    """
    at = len(text) - len(text.removeprefix("\ufeff"))
    while True:
        if space := _SPACE.match(text, at):
            at = space.end()
        if text.startswith("<!DOCTYPE", at):
            found = _DOCTYPE.match(text, at)
            if found is None:
                raise ParseError(
                    "this XML declares entities or other markup of its own; topology files never do, so it is not read",
                    evidence=text[:400],
                )
            at = found.end()
        elif mark := next((m for m in _SKIPPED if text.startswith(m[0], at)), None):
            end = text.find(mark[1], at + len(mark[0]))
            if end < 0:
                return ""
            at = end + len(mark[1])
        else:
            name = _NAME.match(text, at)
            return name[1] if name else ""


def parse(text: str, what: str) -> ET.Element:
    """Return the root; ``what`` names the expected format in errors.

    Raises
    ------
    ParseError
        Not well-formed, cut off, nested deeper than any topology, or as :func:`root_name`.

    """
    root_name(text)
    try:
        # A str is parsed as UTF-8 whatever its declaration says: no encoding can hide a declaration from root_name.
        root = ET.fromstring(text.removeprefix("\ufeff"))
    except ET.ParseError as e:
        at = f"line {e.position[0]} of {text.count(chr(10)) + 1}"
        raise ParseError(f"not {what}, or cut off: {expat.ErrorString(e.code)}, {at}", evidence=text[:400]) from e
    except UnicodeError as e:
        raise ParseError(f"not {what}: it has characters that are no text", evidence=text[:400]) from e
    level, depth = [root], 0
    while level:
        depth += 1
        if depth > _MAX_DEPTH:
            raise ParseError(f"not {what}: elements are nested more than {_MAX_DEPTH} deep", evidence=text[:400])
        level = [child for element in level for child in element]
    return root


def read(element: ET.Element, name: str, convert: Callable[[str], _T], expected: str, absent: str = "") -> _T:
    """Return the element's attribute, converted; ``absent`` if it is missing or empty.

    Raises
    ------
    Misread
        ``convert`` raised a ValueError.

    """
    try:
        return convert(element.get(name) or absent)
    except ValueError as e:
        raise Misread(element, name, expected) from e


def whole(element: ET.Element, name: str, absent: str = "0") -> int:
    """Return an attribute that is a whole number."""
    return read(element, name, _whole, "a whole number", absent)


def count(element: ET.Element, name: str, absent: str = "0") -> int:
    """Return an attribute that is a size or an index."""
    return read(element, name, _count, "a whole number from 0", absent)


def cpuset(element: ET.Element, name: str) -> CpuSet:
    """Return an attribute that is a mask; empty if it is missing."""
    return read(element, name, mask, "a mask such as 0x00000001,0x0000ffff", "0x0")


def word(element: ET.Element, name: str) -> str:
    """Return an attribute as one line of text: names come from firmware, and are printed on terminals."""
    return printable(element.get(name) or "")


def misread(text: str, root: ET.Element, error: Misread) -> ParseError:
    """Return the error for a value, with its line, the value, and what was expected."""
    element = error.element
    given = printable(element.get(error.name) or "")
    had = f"{error.name}={given[:40]!r}" if error.name in element.attrib else f"no {error.name}"
    at = _line_of(text, next(i for i, e in enumerate(root.iter()) if e is element))
    kind = element.get("type") or element.get("name") or ""
    what = f"<{element.tag[:40]} {kind[:40]}>" if kind else f"<{element.tag[:40]}>"
    return ParseError(f"line {at}: {printable(what)} has {had}; expected {error.expected}", evidence=text[:400])


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


def _count(text: str) -> int:
    if (number := _whole(text)) < 0:
        raise ValueError(text[:40])
    return number


def mask(text: str) -> CpuSet:
    """Return the set that a mask of 32-bit words names, most significant first: ``0x1,0x0000ffff`` or ``1,0000ffff``.

    Raises
    ------
    ParseError
        Not such a mask, or of more PUs than Linux can have.

    """
    if len(text) > _MAX_MASK or not _MASK.fullmatch(text.strip()):
        raise ParseError(f"{text[:40]!r} is not a mask such as 0x00000001,0x0000ffff", evidence=text[:400])
    return CpuSet.from_mask(text.strip())
