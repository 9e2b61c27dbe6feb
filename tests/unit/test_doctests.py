"""The examples in docstrings run; those that start a cluster run in ``tests/process/test_docs.py``."""

from __future__ import annotations

import doctest
import importlib
import re

import pytest
from paths import PACKAGE

import hpcgpu

CLUSTERS = {hpcgpu._HOMES[name] for name in ("SLURMGPUCluster", "LocalGPUCluster", "GPURunner")}
# Found by their text: nothing is imported for it.
FILES = [path for path in PACKAGE.rglob("*.py") if re.search(r"^ *>>> ", path.read_text(), re.MULTILINE)]
MODULES = {".".join(p.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__") for p in FILES}


@pytest.mark.parametrize("name", sorted(MODULES - CLUSTERS))
def test_examples_of_docstrings(name: str) -> None:
    failed, tried = doctest.testmod(importlib.import_module(name))
    assert tried
    assert not failed


def test_clusters_examples_are_known() -> None:
    """A module of this list has examples, so that none is left out by its old name."""
    assert CLUSTERS <= MODULES
