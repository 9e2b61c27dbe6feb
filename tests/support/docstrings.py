"""Which modules have examples in their docstrings, and which of these need a cluster."""

from __future__ import annotations

import doctest
import importlib
import re

from paths import PACKAGE

import hpcgpu

# By module: the class whose example starts a cluster.
CLUSTERS = {hpcgpu._HOMES[name]: name for name in ("SLURMGPUCluster", "LocalGPUCluster", "GPURunner")}


def modules() -> set[str]:
    """Return the names of the modules with examples, found in their text: nothing is imported for it."""
    found = (p for p in PACKAGE.rglob("*.py") if re.search(r"^ *>>> ", p.read_text(), re.MULTILINE))
    return {".".join(p.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__") for p in found}


def example(name: str) -> str:
    """Return the example of a public class as a script that prints its results."""
    kind = getattr(importlib.import_module("hpcgpu"), name)
    return doctest.script_from_examples(kind.__doc__ or "")
