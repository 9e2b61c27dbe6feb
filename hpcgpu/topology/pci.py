"""Kinds of PCI functions, distances between them, and names from firmware, for all readers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from hpcgpu.errors import ParseError
from hpcgpu.model import CpuSet, Gpu, Hop, Nic, NumaNode

# A board's management controller is a VGA device too (ASPEED 1a03, Matrox 102b), so the vendor decides.
# Intel's 0300 is the graphics of a desktop CPU; its Data Center Max is 0380. AMD's Instinct is 1200 or 0380.
_GPU_CLASSES = {
    "10de": ("nvidia", ("0300", "0302")),
    "1002": ("amd", ("0300", "0302", "0380", "1200")),
    "8086": ("intel", ("0380",)),
}
NO_PCI = "no PCI device is described, so neither GPUs nor network cards are known"

_ADDRESS = re.compile(r"([0-9a-fA-F]{1,8}):([0-9a-fA-F]{1,2}):([0-9a-fA-F]{1,2})(?:\.([0-7]))?")
_SPEED = re.compile(r"([0-9]{1,3}(?:\.[0-9]+)?) GT/s", re.ASCII)
_LANES = re.compile(r"[0-9]{1,2}", re.ASCII)
_CASSINI = ("17db", "0501")
_OMNI_PATH = ("8086", ("24f0", "24f1"))
# RDMA devices that are no RoCE, and that UCX's verbs transports do not support: Cisco usNIC, AWS EFA.
_NOT_ROCE = {"1137": "usnic", "1d0f": "efa"}
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


def address(text: str) -> str:
    """Format a PCI address as the kernel does, ``0000:06:00.0``; raise ParseError for other text."""
    # NVML writes eight digits for the domain, in capitals (00000000:3B:00.0).
    match = _ADDRESS.fullmatch(text.strip())
    if match is None:
        raise ParseError(f"{text[:40]!r} is not a PCI address such as 0000:06:00.0", evidence=text)
    domain, bus, device, function = (int(word or "0", 16) for word in match.groups())
    return f"{domain:04x}:{bus:02x}:{device:02x}.{function:x}"


def gpu_vendor(klass: str, vendor: str) -> str:
    """Return ``nvidia``, ``amd`` or ``intel`` for a GPU's class (``0302``) and vendor (``10de``); "" otherwise."""
    name, classes = _GPU_CLASSES.get(vendor, ("", ()))
    return name if klass in classes else ""


def is_slingshot(vendor: str, device: str) -> bool:
    """Return whether the device is HPE's Cassini, of which hwloc before 2.14 shows the Ethernet interface only."""
    return (vendor, device) == _CASSINI


def nic_kind(klass: str, vendor: str, device: str, link_layer: str = "", lid: int = 0) -> str:
    """Return the kind of an RDMA device's port: from the kernel's ``link_layer`` if known, else from the class."""
    # ConnectX-3 has class 0280 in both modes: there Ethernet ports have no local identifier (lid).
    if is_slingshot(vendor, device):
        return "slingshot"
    if klass == "0208" or (vendor, device[:4]) in [(_OMNI_PATH[0], d) for d in _OMNI_PATH[1]]:
        return "opa"
    if vendor in _NOT_ROCE:
        return _NOT_ROCE[vendor]
    if link_layer:
        return "infiniband" if link_layer.lower() == "infiniband" else "roce"
    return "infiniband" if klass in _INFINIBAND or (klass == "0280" and lid) else "roce"


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
    """Return the PCI path of each pair of GPU and NIC with a common bridge."""
    # chains has the bridges above each device, from the top; host_bridges: the first of them is the host bridge. The
    # distance of other pairs is that of their NUMA nodes.
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
    transfers, lanes = _SPEED.match(speed.strip()), _LANES.fullmatch(width.strip())
    if transfers is None or lanes is None:
        return 0.0
    rate = float(transfers[1])
    return rate * (0.8 if rate <= 5 else 128 / 130) / 8 * int(lanes[0])  # 8b/10b coding until PCI Express 2


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
