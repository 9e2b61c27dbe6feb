"""Slurm's nodes: the names in a list of them, and which do not answer. Tried on Slurm 22.05.8 (17-node-died)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from hpcgpu.model import Command, Result

# A comma between brackets parts runs of numbers, any other one names.
_COMMA = re.compile(r",(?![^\[]*\])")
_RUNS = re.compile(r"([^\[]*)\[([^\]]*)\](.*)")
_NO_REASON = "none"


def names(text: str) -> tuple[str, ...]:
    """Return the nodes of squeue's ``node[1-2,07],login1``; ``None assigned`` of sacct, and nothing, are none."""
    words = _COMMA.split(text) if text and " " not in text and text != "(null)" else []
    return tuple(name for word in words for name in _expanded(word))


def _expanded(word: str) -> Iterator[str]:
    found = _RUNS.fullmatch(word)
    if not found:
        yield word
        return
    before, runs, after = found.groups()
    for run in runs.split(","):
        first, _, last = run.partition("-")
        if not first.isdecimal() or not (last or first).isdecimal():  # nothing that Slurm writes
            yield word
            return
        for number in range(int(first), int(last or first) + 1):
            yield from _expanded(f"{before}{number:0{len(first)}}{after}")


def sinfo(hosts: Sequence[str]) -> Command:
    """Return the sinfo for nodes, a line for each and each of its partitions; the reason is the only free text."""
    return Command(("sinfo", "--noheader", "--Node", f"--nodes={','.join(hosts)}", "--format=%N|%T|%E"))


def read_lost(result: Result) -> Mapping[str, str]:
    """Return what sinfo says of nodes that are down, or do not answer slurmctld (``mixed*``)."""
    out = dict[str, str]()
    for line in result.stdout.splitlines() if result.returncode == 0 else ():
        node, state, reason = (*line.strip().split("|", 2), "", "")[:3]
        if state.startswith("down"):
            out[node] = f"{node} is down" if reason in ("", _NO_REASON) else f"{node} is down: {reason}"
        elif state.endswith("*"):
            out[node] = f"{node} does not answer Slurm"
    return out
