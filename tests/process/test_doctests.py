"""The examples of the classes that start a cluster here. SLURMGPUCluster's is the README's: the lab runs that."""

from __future__ import annotations

import doctest
import subprocess
import sys
from pathlib import Path

import ranks
from docstrings import example
from waiting import scaled

import hpcgpu


def test_local_cluster() -> None:
    found = doctest.DocTestFinder(recurse=False).find(hpcgpu.LocalGPUCluster, "LocalGPUCluster", globs={})
    results = [doctest.DocTestRunner().run(test) for test in found]
    assert [(r.failed, r.attempted) for r in results] == [(0, 3)]


def test_runner(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(example("GPURunner"))
    argv, pipes = [sys.executable, "script.py"], {"capture_output": True, "text": True}
    done = subprocess.run(argv, cwd=tmp_path, env=ranks.environment(), timeout=scaled(120), **pipes)
    assert done.stdout == "3\n", done.stderr
