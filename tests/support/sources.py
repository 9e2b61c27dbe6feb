"""The modules of the package, each parsed once in a process."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

from paths import PACKAGE

MODULES = sorted(PACKAGE.rglob("*.py"))


DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def qualified(tree: ast.AST, name: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Yield each node, with the qualified name of the definition that it is, or stands in."""
    yield name, tree
    for child in ast.iter_child_nodes(tree):
        yield from qualified(child, f"{name}.{child.name}".strip(".") if isinstance(child, DEFINITIONS) else name)
