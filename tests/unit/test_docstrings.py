"""Docstrings: numpydoc for what users call, one imperative line for the rest."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

from paths import PACKAGE, ROOT

import hpcgpu

# A heading of numpydoc: a line of one or two words, underlined.
SECTION = re.compile(r"^ *[A-Z]\w+( \w+)?\n *-{3,}$", re.MULTILINE)
# Public without a line in docs/reference/api.md: what other batch systems, libraries and clusters implement.
INTERFACES = ("hpcgpu.batch.BatchSystem", "hpcgpu.spill.devices.protocols.Device")
INTERFACES += ("hpcgpu.spill.devices.protocols.Copies",)
# Its docstring becomes a part of those of the clusters.
BASE = "hpcgpu.deploy.cluster.cluster.GPUCluster"
# No verbs: a function's first line says what it does.
NOUNS = {"A", "An", "The", "What", "Whether", "Those", "One", "Nothing", "It", "No", "All", "How", "Where", "If", "For"}
DEFINITIONS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
FILES = sorted(str(p.relative_to(PACKAGE)) for p in PACKAGE.rglob("*.py"))


@functools.cache
def public() -> set[str]:
    """Return the objects whose docstrings keep sections, as ``module.qualname``."""
    text = (ROOT / "docs/reference/api.md").read_text()
    blocks = re.findall(r"^\.\. auto\w+:: ([\w.]+)\n((?: +:.*\n(?: {6,}\S.*\n)*)*)", text, re.MULTILINE)
    shown = [(name if "." in name else f"hpcgpu.{name}", options) for name, options in blocks]
    shown += [(name, ":members:") for name in INTERFACES]
    objects: list[object] = [importlib.import_module(BASE.rpartition(".")[0]).GPUCluster]
    for name, options in shown:
        module, _, attribute = name.rpartition(".")
        made = getattr(importlib.import_module(module), attribute)
        members = re.search(r":members:(.*)", options, re.DOTALL)
        objects.append(made)
        if members:
            names = re.findall(r"\w+", members[1]) or [n for n in vars(made) if not n.startswith("_")]
            objects += [inspect.getattr_static(made, n) for n in names]
    return {f"{o.__module__}.{o.__qualname__}" for o in map(_function, objects) if hasattr(o, "__qualname__")}


def _function(made: object) -> object:
    for name in ("fget", "func", "__func__", "__wrapped__"):
        made = getattr(made, name, None) or made
    return made


def definitions(file: str) -> Iterator[tuple[str, ast.AST, str]]:
    """Yield each definition of a file with a docstring, with its full name."""
    module = ".".join(Path("hpcgpu", file).with_suffix("").parts).removesuffix(".__init__")

    def walk(node: ast.AST, name: str) -> Iterator[tuple[str, ast.AST, str]]:
        if isinstance(node, DEFINITIONS) and (text := ast.get_docstring(node)):
            yield name, node, text
        for child in ast.iter_child_nodes(node):
            yield from walk(child, f"{name}.{child.name}" if isinstance(child, DEFINITIONS[1:]) else name)

    return walk(ast.parse((PACKAGE / file).read_text()), module)


def sections(file: str) -> list[str]:
    return [name for name, _, text in definitions(file) if SECTION.search(text) and name not in public()]


def test_internals_have_no_sections() -> None:
    names = [name for file in FILES for name in sections(file)]
    assert names == [], "internal: write one line; facts go to a second line, fields to comments beside them"


def test_functions_first_line_begins_with_a_verb() -> None:
    lines = [
        f"{name}: {text.splitlines()[0]}"
        for file in FILES
        for name, node, text in definitions(file)
        if isinstance(node, DEFINITIONS[2:])
        and not any("property" in ast.unparse(d) for d in node.decorator_list)
        and re.match(r"\w+", text)[0] in NOUNS
    ]
    assert lines == []


def test_public_objects_have_docstrings() -> None:
    assert {"hpcgpu.deploy.cluster.batch.SLURMGPUCluster", "hpcgpu.sim.gpu.SimGpu.asarray"} <= public()
    assert {"hpcgpu.deploy.cluster.batch.BatchGPUCluster.scale", BASE} <= public()
    assert "hpcgpu.deploy.cluster.cluster.GPUCluster.entry_point" not in public()
    assert all(inspect.getdoc(getattr(hpcgpu, name)) for name in hpcgpu.__all__)
