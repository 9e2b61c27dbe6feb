"""What processes listen on, and what docs/security.md says that they may."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import psutil

DOCUMENT = Path(__file__).parents[2] / "docs/security.md"
_HEARS = 0x10000  # __SO_ACCEPTCON


class Listening(NamedTuple):
    """One socket, in the words of the table."""

    kind: str
    where: str


def of(pid: int) -> list[Listening]:
    """Return the TCP and unix sockets of a process that others can reach by an address or a name."""
    try:
        inodes = {link[8:-1] for link in _links(pid) if link.startswith("socket:[")}
        tcp = [c for c in psutil.Process(pid).net_connections("inet") if c.status == "LISTEN"]
    except (psutil.NoSuchProcess, FileNotFoundError):
        return []  # it has ended
    out = [Listening("TCP", "loopback" if c.laddr.ip in ("127.0.0.1", "::1") else "all interfaces") for c in tcp]
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split(maxsplit=7)
        name = fields[7] if len(fields) > 7 else ""
        # what was accepted at a name shows it, too
        accepted = name and not name.startswith("@") and not int(fields[3], 16) & _HEARS
        if fields[6] in inodes and name and not accepted:
            out.append(Listening("unix", "abstract" if name.startswith("@") else f"`{Path(name).name}`"))
    return out


def _links(pid: int) -> Iterable[str]:
    for path in Path(f"/proc/{pid}/fd").iterdir():
        try:
            yield str(path.readlink())
        except FileNotFoundError:
            continue


def documented(process: str) -> set[Listening]:
    """Return what a process may listen on by the table in docs/security.md."""
    out = set()
    for row in re.findall(r"^\| (.*) \| (TCP|unix) \| (.*?) \| .* \|$", DOCUMENT.read_text(), re.M):
        if row[0].startswith(process):
            names = ("loopback", "all interfaces", "abstract", "`leader`", "`leader-N`")
            out |= {Listening(row[1], word) for word in names if word in row[2]}
    assert out, f"the table has no {process!r}"
    return out
