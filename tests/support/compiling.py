"""Libraries of C that stand in for a driver's."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def compile_library(source: Path, target: Path, *options: str) -> None:
    """Compile a shared library, which a new process finds by LD_LIBRARY_PATH."""
    gcc = shutil.which("gcc")
    if gcc is None:
        pytest.skip(f"no gcc here to compile {source.name} (Debian: gcc and libc6-dev)")
    argv = [gcc, "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", *options]
    subprocess.run([*argv, "-o", str(target), str(source)], check=True, timeout=60)
