"""Read a topology file of either format."""

from __future__ import annotations

from hpcgpu.errors import ParseError
from hpcgpu.model import Topology
from hpcgpu.topology import hwloc_xml, nccl_xml, safe_xml

MAX_BYTES = 8 * 2**20  # of a file; recorded ones are below 1 MiB. A caller reads at most one byte more.
_ALLOWED = (
    "hwloc's XML (lstopo --disallowed --of xml machine.xml), NCCL's topology XML (NCCL_TOPO_FILE, NCCL_TOPO_DUMP_FILE)"
)


def read(text: str) -> Topology:
    """Parse hwloc's or NCCL's XML into a topology; ParseError for another format, or a text over :data:`MAX_BYTES`."""
    if len(text) > MAX_BYTES or len(text.encode(errors="replace")) > MAX_BYTES:
        problem = f"this file has more than {MAX_BYTES >> 20} MiB, so it is no topology file"
        raise ParseError(f"{problem}; allowed: {_ALLOWED}", evidence=text[:400])
    if not text.lstrip("\ufeff \t\r\n").startswith("<"):
        start = f"it begins with {text[:40]!r}" if text.strip() else "empty"
        raise ParseError(f"not a topology file: {start}; allowed: {_ALLOWED}", evidence=text[:400])
    with safe_xml.reading(text, "a topology file") as root:
        if root.tag == "topology":
            return hwloc_xml.topology_of(root, text)
        if root.tag == "system":
            return nccl_xml.topology_of(root, text)
    raise ParseError(f"not a topology file: it begins with <{root.tag[:40]}>; allowed: {_ALLOWED}", evidence=text[:400])
