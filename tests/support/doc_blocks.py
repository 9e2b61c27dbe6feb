"""Blocks of code in the pages of docs, and how each is tried."""

import ast
import inspect
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import commands
from paths import ROOT

import hpcgpu
from hpcgpu.config.migration import HINTS
from hpcgpu.model.settings import BY_NAME

DOCS = ROOT / "docs"
# What those who come from another tool type is run by tests of its own; the others are notes of developers.
_ELSEWHERE = {"coming-from", "decisions"}
PAGES = sorted(page for page in DOCS.rglob("*.md") if page.parent.name not in _ELSEWHERE)
# Programs of the shell, of batch systems and of this checkout that a line may begin with.
_PROGRAMS = {"python", "sbatch", "squeue", "make", "srun", "salloc", "qsub", "mpirun", "eval", "hpcgpu", "lstopo"}
_PROGRAMS |= {"git", "cd", "python3", ".", "pip", "grep", "cat", "cp"}
# Lines that begin so are typed, not read: they need a fence with a language.
_TYPED = re.compile(r"^(?:\$ )?(?:hpcgpu|python3?|pip|make|sbatch|qsub|srun|mpirun) .*", re.M)
_FENCES = re.compile(r"^```.*?^```$", re.S | re.M)
_FILE = re.compile(r"[\w-]+\.\w+")
_FENCE = re.compile(r"(?:<!-- (file|lab|checked): ([^\n]*?) -->\n)?```([\w{}-]*)\n(.*?)^```$", re.S | re.M)


@dataclass(frozen=True, slots=True)
class Block:
    """A block: ``how`` it is tried (``run`` if nothing is said), the rest of that comment, its language and text."""

    how: str
    word: str
    kind: str
    text: str
    before: str = ""

    @property
    def file(self) -> str:
        """The file in which people save it; empty: in none."""
        return self.word if self.how in ("file", "lab") and _FILE.fullmatch(self.word) else ""


def blocks(page: Path) -> tuple[Block, ...]:
    """Return the blocks of a page."""
    parsed, text, end = [], page.read_text(), 0
    for fence in _FENCE.finditer(text):
        how, word, kind, code = fence.groups(default="")
        parsed.append(Block(how or "run", word, kind, code, text[end : fence.start()]))
        end = fence.end()
    return tuple(parsed)


def typed(block: Block) -> list[str]:
    """Return the lines of a block without a language that are commands."""
    return _TYPED.findall(block.text) if block.kind in ("", "text") else []


def mentions(text: str) -> tuple[str, ...]:
    """Return what stands between backticks in the text of a page and begins with ``hpcgpu`` and another word."""
    return tuple(" ".join(code.split()) for code in re.findall(r"`(hpcgpu\s[^`]+)`", _FENCES.sub("", text)))


def check_mention(line: str) -> None:
    """Raise for a command or option that there is not; what it needs besides may be left out."""
    try:
        commands.check(line)
    except click.MissingParameter:
        pass
    except click.BadOptionUsage as error:
        if "requires an argument" not in error.message:
            raise


def lines(block: Block) -> Iterator[str]:
    """Yield the commands of a block of shell."""
    for line in block.text.splitlines():
        if line.strip() and not line.startswith("#"):
            yield line


def check(block: Block) -> None:
    """Raise for what would be refused as it is written."""
    if block.kind == "bash":
        for line in lines(block):
            arguments = [w for w in shlex.split(line, comments=True) if not re.fullmatch(r"\w+=.*", w)]
            if arguments[0] not in _PROGRAMS:
                raise ValueError(f"nothing tries {line!r}")
            if "hpcgpu" in arguments and arguments[0] not in ("git", "cd"):  # the folder of a clone
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
