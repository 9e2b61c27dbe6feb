"""PCI functions, for all readers: kinds, distances, and names from firmware; and safe parsing of untrusted XML."""

from __future__ import annotations

import pyexpat as expat  # xml.parsers.expat is the same, and three modules more
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from hpcgpu.errors import ParseError
from hpcgpu.light_typing import TYPE_CHECKING
from hpcgpu.model.allocation import CpuSet
from hpcgpu.model.topology import Gpu, Hop, Nic, NumaNode

if TYPE_CHECKING:
    from typing import TypeVar

    _T = TypeVar("_T")

# A board's management controller is a VGA device too (ASPEED 1a03, Matrox 102b), so the vendor decides.
# Intel's 0300 is the graphics of a desktop CPU; its Data Center Max is 0380. AMD's Instinct is 1200 or 0380.
_GPU_CLASSES = {
    "10de": ("nvidia", ("0300", "0302")),
    "1002": ("amd", ("0300", "0302", "0380", "1200")),
    "8086": ("intel", ("0380",)),
}
NO_PCI = "no PCI device is described, so neither GPUs nor network cards are known"

_DIGITS = "0123456789"
_HEXADECIMAL = _DIGITS + "abcdefABCDEF"
_CASSINI = ("17db", "0501")
# Shipped NCCL files write these numbers for devices that the virtual machine does not show.
MADE_UP = ("0000", "ffff")
_OMNI_PATH = ("8086", ("24f0", "24f1"))
# RDMA devices that are no RoCE, and that UCX's verbs transports do not support: Cisco usNIC, AWS EFA.
_NOT_ROCE = {"1137": "usnic", "1d0f": "efa"}
# The maker whose RoCE UCX drives: NVIDIA, formerly Mellanox. Others' devices are iWARP (Chelsio, Intel), or lack what
# UCX needs to connect (Microsoft's MANA, Alibaba's eRDMA, QLogic): openucx/ucx issues 2507, 3178, 5148 and 9736.
_ROCE_MAKERS = ("15b3", "")  # "": the file names no maker
# Mellanox's before ConnectX-2 have 0c06, "InfiniBand" among the serial buses of the PCI Code and ID Assignment.
_INFINIBAND = ("0207", "0c06")
# hwloc does not say which functions are virtual (/sys does: physfn), the device numbers do: pci.ids.
_VIRTUAL = {
    "15b3": ("1002", "1004", "1014", "1016", "1018", "101a", "101c", "101e"),
    "8086": ("10ca", "10ed", "1515", "1520", "154c", "1889"),
    "1137": ("0071", "00cf"),
}
# DMI names of boards whose maker left them as the firmware's vendor had them.
_PLACEHOLDERS = ("", "to be filled by o.e.m", "system product name", "default string", "not specified", "none", "n/a")
# IBTA's port states, as the kernel and hwloc number them.
_STATES = {"1": "down", "2": "init", "3": "armed", "4": "active"}
# Recorded files are at most 20 levels deep; readers below here may recurse.
_MAX_DEPTH = 200
# 8192 PUs, the most that Linux is built for, are 2815 characters.
_MAX_MASK = 8192


def address(text: str) -> str:
    """Format a PCI address as the kernel does, ``0000:06:00.0``; raise ParseError for other text.

    NVML writes eight digits for the domain, in capitals (00000000:3B:00.0).
    """
    place, _, function = text.strip().partition(".")
    parts = [*place.split(":"), function or "0"]
    lengths = (8, 2, 2, 1)
    # an address may lack its function, but not after a dot
    if len(parts) != 4 or text.strip().endswith(".") or not all(map(is_hexadecimal, parts, lengths)) or parts[3] > "7":
        raise ParseError(f"{text[:40]!r} is not a PCI address such as 0000:06:00.0", evidence=text)
    domain, bus, device, function_number = (int(word, 16) for word in parts)
    return f"{domain:04x}:{bus:02x}:{device:02x}.{function_number:x}"


def is_address(text: str) -> bool:
    """Return whether a text is a PCI address as the kernel writes it, with all its digits."""
    place, _, function = text.partition(".")
    parts = place.split(":")
    return len(parts) == 3 and all(map(is_hexadecimal, parts, (8, 2, 2), (4, 2, 2))) and function in set("01234567")


def is_hexadecimal(text: str, most: int, least: int = 1) -> bool:
    """Return whether a text has ``least`` to ``most`` hexadecimal digits, and nothing else."""
    return least <= len(text) <= most and not text.strip(_HEXADECIMAL)


def gpu_vendor(klass: str, vendor: str) -> str:
    """Return ``nvidia``, ``amd`` or ``intel`` for a GPU's class (``0302``) and vendor (``10de``); "" otherwise."""
    name, classes = _GPU_CLASSES.get(vendor, ("", ()))
    return name if klass in classes else ""


def is_slingshot(vendor: str, device: str) -> bool:
    """Return whether the device is HPE's Cassini, of which hwloc before 2.14 shows the Ethernet interface only."""
    return (vendor, device) == _CASSINI


def nic_kind(klass: str, vendor: str, device: str, link_layer: str = "", lid: int = 0) -> str:
    """Return the kind of an RDMA device's port: from the kernel's ``link_layer`` if known, else from the class.

    ConnectX-3 has class 0280 in both modes: there Ethernet ports have no local identifier (``lid``).
    """
    if is_slingshot(vendor, device):
        return "slingshot"
    if klass == "0208" or (vendor, device[:4]) in [(_OMNI_PATH[0], d) for d in _OMNI_PATH[1]]:
        return "opa"
    if vendor in _NOT_ROCE:
        return _NOT_ROCE[vendor]
    is_infiniband = klass in _INFINIBAND or (klass == "0280" and lid)
    if link_layer.lower() == "infiniband" if link_layer else is_infiniband:
        return "infiniband"
    return "roce" if vendor in (*_ROCE_MAKERS, *MADE_UP) else "rdma"


def is_virtual(vendor: str, device: str) -> bool:
    """Return whether the device number is that of a virtual function."""
    return device in _VIRTUAL.get(vendor, ())


def printable(text: str) -> str:
    """Remove line ends, control characters and surrounding blanks: names from firmware are shown on terminals."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def port_state(number: str) -> str:
    """Return the state of an RDMA port; ``unknown`` for ""."""
    return _STATES.get(number, "down" if number else "unknown")


def hops(
    chains: Mapping[str, Sequence[str]], gpus: Iterable[Gpu], nics: Iterable[Nic], *, host_bridges: bool = True
) -> tuple[Hop, ...]:
    """Return the PCI path of each pair of GPU and NIC with a common bridge.

    ``chains`` has the bridges above each device, from the top; ``host_bridges``: the first of them is the host bridge.
    The distance of other pairs is that of their NUMA nodes.
    """
    out = set()
    for gpu in gpus:
        for nic in nics:
            a, b = chains.get(gpu.pci, ()), chains.get(nic.pci, ())
            shared = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            if shared:
                out.add(Hop(gpu.pci, nic.pci, len(a) + len(b) - 2 * shared + 1, shared - host_bridges))
    return tuple(sorted(out))


def link_gbytes_s(speed: str, width: str) -> float:
    """Return the data rate of a PCI link such as ``16.0 GT/s PCIe`` with 16 lanes, as hwloc does; 0: unknown."""
    number, unit, _ = speed.strip().partition(" GT/s")
    lanes = width.strip()
    integer, dot, fraction = number.partition(".")
    numbers = (integer, lanes, fraction) if dot else (integer, lanes)
    if not unit or len(integer) > 3 or len(lanes) > 2 or not all(n and not n.strip(_DIGITS) for n in numbers):
        return 0.0
    rate = float(number)
    return rate * (0.8 if rate <= 5 else 128 / 130) / 8 * int(lanes)  # 8b/10b coding until PCI Express 2


def product_name(*names: str) -> str:
    """Return the first product name that is not a firmware's placeholder; "" without one."""
    return next((name for name in names if name.strip().lower().rstrip(".") not in _PLACEHOLDERS), "")


def home(nodes: CpuSet, numa: Sequence[NumaNode]) -> int | None:
    """Return the NUMA node of a device that is local to ``nodes``; None if that is ambiguous."""
    described = CpuSet(n.os_index for n in numa)
    near = nodes & described
    if not nodes and len(described) == 1:
        return min(described)
    return min(near) if near and (near != described or len(described) == 1) else None


class Element:
    """An element of XML. Those of xml.etree have no line, and its import takes 13 million instructions."""

    __slots__ = ("attributes", "children", "line", "tag")

    def __init__(self, tag: str, attributes: Mapping[str, str], line: int) -> None:
        self.tag, self.attributes, self.line = tag, attributes, line
        self.children: list[Element] = []

    def get(self, name: str, absent: str = "") -> str:
        """Return an attribute, or ``absent``."""
        return self.attributes.get(name, absent)

    def all(self, tag: str) -> list[Element]:
        """Return the children with this tag."""
        return [child for child in self.children if child.tag == tag]

    def below(self, tag: str) -> Iterator[Element]:
        """Yield this element if it has this tag, and all with it at any depth below, in the order of the text."""
        if self.tag == tag:
            yield self
        for child in self.children:
            yield from child.below(tag)


class Misread(ValueError):
    """An unreadable value of an element; :func:`read_tree` makes a ParseError of it, with its line."""

    def __init__(self, element: Element, name: str, expected: str) -> None:
        super().__init__(expected)
        self.element, self.name, self.expected = element, name, expected


def read_tree(text: str, format_: str, convert: Callable[[Element], _T]) -> _T:
    """Convert the root of XML, called ``format_`` in errors; ParseError for bad or unsafe XML, or for a Misread."""
    root = _tree(text, format_)
    try:
        return convert(root)
    except Misread as error:
        element, name = error.element, error.name
        had = f"{name}={word(element, name)[:40]!r}" if name in element.attributes else f"no {name}"
        kind = element.get("type") or element.get("name") or ""
        tag = printable(f"<{element.tag[:40]} {kind[:40]}>" if kind else f"<{element.tag[:40]}>")
        problem = f"line {element.line}: {tag} has {had}; expected {error.expected}"
        raise ParseError(problem, evidence=text[:400]) from error


def _tree(text: str, format_: str) -> Element:
    """Return the root."""
    parser, top = expat.ParserCreate(), Element("", {}, 0)
    parents = [top]

    def refused(why: str) -> ParseError:
        return ParseError(f"not {format_}: {why}", evidence=text[:400])

    # hwloc's own declaration is <!DOCTYPE topology SYSTEM "hwloc2.dtd">. Expat does not load it.
    def doctype(_name: str, _system: str | None, _public: str | None, has_declarations: int) -> None:
        if has_declarations:
            raise refused("it declares entities or other markup of its own; topology files never do")

    def skipped(name: str, _is_parameter: int) -> None:
        raise refused(f"undefined entity {name[:40]}")

    def start(tag: str, attributes: dict[str, str]) -> None:
        if len(parents) > _MAX_DEPTH:
            raise refused(f"elements are nested more than {_MAX_DEPTH} deep")
        element = Element(tag, attributes, parser.CurrentLineNumber)
        parents[-1].children.append(element)
        parents.append(element)

    parser.StartDoctypeDeclHandler, parser.SkippedEntityHandler = doctype, skipped
    parser.StartElementHandler, parser.EndElementHandler = start, lambda _tag: parents.pop() and None
    try:
        parser.Parse(text.removeprefix("\ufeff"), True)  # as UTF-8, whatever the text's declaration says
    except expat.ExpatError as e:
        at = f"line {e.lineno} of {text.count(chr(10)) + 1}"
        raise ParseError(f"not {format_}, or cut off: {expat.ErrorString(e.code)}, {at}", evidence=text[:400]) from e
    except UnicodeError as e:
        raise refused("it has characters that are not text") from e
    return top.children[0]


def read(element: Element, name: str, convert: Callable[[str], _T], expected: str, absent: str = "") -> _T:
    """Convert an element's attribute; ``absent`` is used if it is missing or "". Raises Misread after a ValueError."""
    try:
        return convert(element.get(name) or absent)
    except ValueError as e:
        raise Misread(element, name, expected) from e


def whole(element: Element, name: str, absent: str = "0") -> int:
    """Return an attribute that is a whole number."""
    return read(element, name, _whole, "a whole number", absent)


def count(element: Element, name: str) -> int:
    """Return an attribute that is a size or an index; 0 if it is missing."""
    if (number := read(element, name, _whole, "a whole number from 0", "0")) < 0:
        raise Misread(element, name, "a whole number from 0")
    return number


def cpuset(element: Element, name: str) -> CpuSet:
    """Return an attribute that is a mask; empty if it is missing."""
    return read(element, name, mask, "a mask such as 0x00000001,0x0000ffff", "0x0")


def word(element: Element, name: str) -> str:
    """Return an attribute as one line of printable text."""
    return printable(element.get(name) or "")


def _whole(text: str) -> int:
    digits = text.strip().removeprefix("-")
    if not 1 <= len(digits) <= 19 or digits.strip(_DIGITS):
        raise ValueError(text[:40])
    return int(text)


def mask(text: str) -> CpuSet:
    """Parse a mask of 32-bit words, most significant first: ``0x1,0x0000ffff``, ``1,0000ffff``; or ParseError."""
    parts = (part.removeprefix("0x") for part in text.strip().split(","))
    if len(text) > _MAX_MASK or not all(is_hexadecimal(part, 8, 0) for part in parts):
        raise ParseError(f"{text[:40]!r} is not a mask such as 0x00000001,0x0000ffff", evidence=text[:400])
    return CpuSet.from_mask(text.strip())
