"""XML from anybody's hand, parsed without harm: no markup of its own, nothing loaded, no depth without end."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

from hpcgpu.errors import ParseError
from hpcgpu.model import CpuSet

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


def root_name(text: str) -> str:
    """Return the name of the first element, from the prolog alone; empty where there is none.

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
    except (ET.ParseError, UnicodeError) as e:
        raise ParseError(f"not {what}, or cut off: {e}", evidence=text[:400]) from e
    level, depth = [root], 0
    while level:
        depth += 1
        if depth > _MAX_DEPTH:
            raise ParseError(f"not {what}: elements are nested more than {_MAX_DEPTH} deep", evidence=text[:400])
        level = [child for element in level for child in element]
    return root


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
