"""Programs of a test: code in a Python of its own, and shell scripts that answer as a batch system's programs do."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from waiting import scaled

MPICH, INTEL_MPI = "mpich==5.0.2", "impi-rt==2021.19.0"
# Prints the hosts and workers of its run, and its arguments.
COUNT_HOSTS = """
import sys
from distributed import Client
with Client() as client:
    workers = client.nthreads()
    hosts = {address.rpartition(":")[0] for address in workers}
    print("HOSTS", len(hosts), "WORKERS", len(workers), "ARGUMENTS", *sys.argv[1:])
"""


def python(code: str, *words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run code in a new Python, and return what it printed."""
    argv = [sys.executable, "-c", code, *map(str, words)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=scaled(60), **options)


def program(path: Path, body: str) -> Path:
    """Write a program for ``sh``."""
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def install(package: str, folder: Path) -> Path:
    """Install a package of programs into a folder of its own; skip the test without an index, but with CI."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--prefix", str(folder)]
    done = subprocess.run([*pip, package], capture_output=True, text=True, timeout=scaled(150))
    if done.returncode:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(f"pip install {package}: {done.stderr[-300:]}")
    return folder
