"""The modules of the package, each parsed once in a process."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

from paths import PACKAGE

MODULES = sorted(PACKAGE.rglob("*.py"))


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())
