"""Kinds of PCI functions, and distances between them, for all readers."""

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
    """Return a PCI address as the kernel writes it: ``0000:06:00.0``.

    NVML writes eight digits for the domain, in capitals (``00000000:3B:00.0``).

    Raises
    ------
    ParseError
        Not domain:bus:device.function.

    """
    found = _ADDRESS.fullmatch(text.strip())
    if found is None:
        raise ParseError(f"{text[:40]!r} is not a PCI address such as 0000:06:00.0", evidence=text)
    domain, bus, device, function = (int(word or "0", 16) for word in found.groups())
    return f"{domain:04x}:{bus:02x}:{device:02x}.{function:x}"


def gpu_vendor(klass: str, vendor: str) -> str:
    """Return ``nvidia``, ``amd`` or ``intel`` for the class (``0302``) and vendor (``10de``) of a GPU, else nothing."""
    name, classes = _GPU_CLASSES.get(vendor, ("", ()))
    return name if klass in classes else ""


def is_slingshot(vendor: str, device: str) -> bool:
    """Tell HPE's Cassini: hwloc before 2.14 shows its Ethernet interface only."""
    return (vendor, device) == _CASSINI


def nic_kind(klass: str, vendor: str, device: str, link_layer: str = "", lid: int = 0) -> str:
    """Return the kind of an RDMA device's port.

    ``link_layer`` is the kernel's word where known. Else the class, and for ConnectX-3, which is
    class 0280 in both modes, the local identifier: Ethernet ports have none.
    """
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
    """Tell a virtual function by its device number."""
    return device in _VIRTUAL.get(vendor, ())


def port_state(number: str) -> str:
    """Return the state of an RDMA port, ``unknown`` for an empty word."""
    return _STATES.get(number, "down" if number else "unknown")


def hops(
    chains: Mapping[str, Sequence[str]], gpus: Iterable[Gpu], nics: Iterable[Nic], *, host_bridges: bool = True
) -> tuple[Hop, ...]:
    """Return the PCI paths of the pairs of GPU and NIC that have a bridge in common.

    ``chains`` holds the bridges above each device from the top; ``host_bridges``: the first is the host bridge.
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
    transfers, lanes = _SPEED.match(speed.strip()), _LANES.fullmatch(width.strip())
    if transfers is None or lanes is None:
        return 0.0
    rate = float(transfers[1])
    return rate * (0.8 if rate <= 5 else 128 / 130) / 8 * int(lanes[0])  # 8b/10b coding until PCI Express 2


def product_name(*names: str) -> str:
    """Return the first name of the machine that a person has given; firmware has placeholders."""
    return next((name for name in names if name.strip().lower().rstrip(".") not in _PLACEHOLDERS), "")


def home(nodes: CpuSet, numa: Sequence[NumaNode]) -> int | None:
    """Return the NUMA node of a device that is local to ``nodes``; None if that is ambiguous."""
    known = CpuSet(n.os_index for n in numa)
    near = nodes & known
    if not nodes and len(known) == 1:
        return min(known)
    return min(near) if near and (near != known or len(known) == 1) else None
