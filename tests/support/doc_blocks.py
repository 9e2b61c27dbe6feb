"""Blocks of code in the pages of docs, and how each is tried.

A comment before the fence says it: ``<!-- file: NAME -->`` is a file for the commands of the page,
``<!-- lab: NAME -->`` one that a test on the lab runs, ``<!-- checked: REASON -->`` what is read by a parser and not
run. All others are run.
"""

from __future__ import annotations

import ast
import inspect
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import commands
from paths import ROOT

import hpcgpu
from hpcgpu.config.layers import BY_NAME
from hpcgpu.config.migration import HINTS

DOCS = ROOT / "docs"
# What those who come from another tool type is run by tests of its own; the others are notes of developers.
_ELSEWHERE = {"coming-from", "decisions", "facts"}
PAGES = sorted(page for page in DOCS.rglob("*.md") if page.parent.name not in _ELSEWHERE)
# Programs of the shell, of batch systems and of this checkout that a line may begin with.
_PROGRAMS = {"python", "sbatch", "squeue", "make", "srun", "salloc", "qsub", "mpirun", "eval", "hpcgpu", "lstopo"}
_FENCE = re.compile(r"(?:<!-- (file|lab|checked): ([^\n]*?) -->\n)?```([\w{}-]*)\n(.*?)^```$", re.S | re.M)


@dataclass(frozen=True, slots=True)
class Block:
    """A block: ``how`` it is tried (``run`` if nothing is said), the rest of that comment, its language and text."""

    how: str
    word: str
    kind: str
    text: str


def blocks(page: Path) -> tuple[Block, ...]:
    """Return the blocks of a page."""
    return tuple(Block(how or "run", word, kind, text) for how, word, kind, text in _FENCE.findall(page.read_text()))


def lines(block: Block) -> Iterator[str]:
    """Yield the commands of a block of shell."""
    for line in block.text.splitlines():
        if line.strip() and not line.startswith("#"):
            yield line


def check(block: Block) -> None:
    """Raise for what would be refused as it is written."""
    if block.kind == "bash":
        for line in lines(block):
            words = [w for w in shlex.split(line, comments=True) if not re.fullmatch(r"\w+=.*", w)]
            if words[0] not in _PROGRAMS:
                raise ValueError(f"nothing tries {line!r}")
            if "hpcgpu" in words:
                commands.check(line)
    else:
        _check_python(block.text)


def _check_python(text: str) -> None:
    """Keywords of our classes are options that there are."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in hpcgpu.__all__:
            taken = {*inspect.signature(getattr(hpcgpu, node.func.id)).parameters, *BY_NAME, *HINTS}
            if unknown := [k.arg for k in node.keywords if k.arg and k.arg not in taken]:
                raise ValueError(f"{node.func.id} takes no {unknown}")
