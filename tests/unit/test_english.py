"""The English of package and tests, and the form of docstrings, as far as a test sees them."""

import ast
import functools
import importlib
import inspect
import re
from collections.abc import Callable, Iterator

import pytest
from paths import PACKAGE, ROOT, TESTS
from sources import DEFINITIONS, MODULES, parsed, qualified

import hpcgpu

FIRST_WORDS = re.compile(r"(What|Who|Whoever|Whatever|Whether|Those|These|It|Such|Nothing|One (of|that|which))\b")
# No verbs: a function's first line says what it does.
NOUNS = re.compile(r"(A|An|The|One|No|All|How|Where|If|For)\b")
WORDS = {"found", "there", "own", "said", "words", "given", "wanted", "known", "asked", "told", "what", "those", "one"}
PHRASES = re.compile(r"\b([iI]s none|[aA]re none|cannot be had|no word|[nN]obody|of no use|as of now)\b")
# A heading of numpydoc: a line of one or two words, underlined.
SECTION = re.compile(r"^ *[A-Z]\w+( \w+)?\n *-{3,}$", re.MULTILINE)
# Public without a line in docs/reference/api.md: what other batch systems, libraries and clusters implement.
INTERFACES = ("hpcgpu.batch.BatchSystem", "hpcgpu.spill.devices.device.Device")
INTERFACES += ("hpcgpu.spill.devices.device.Copies",)
# Its docstring becomes a part of those of the clusters.
BASE = "hpcgpu.deploy.cluster.cluster.GPUCluster"


def modules() -> tuple[tuple[str, ast.Module], ...]:
    return tuple((str(p.relative_to(PACKAGE)), parsed(p)) for p in MODULES)


def documented(tree: ast.AST) -> Iterator[tuple[str, ast.AST, str]]:
    """Yield each definition with a docstring, with its qualified name."""
    for name, node in qualified(tree):
        if isinstance(node, (ast.Module, *DEFINITIONS)) and (text := ast.get_docstring(node)):
            yield name, node, text


def first_words(tree: ast.Module) -> Iterator[str]:
    for _, node, text in documented(tree):
        is_function = isinstance(node, DEFINITIONS[1:])
        is_property = is_function and any("property" in ast.unparse(d) for d in node.decorator_list)
        if FIRST_WORDS.match(text) or (is_function and not is_property and NOUNS.match(text)):
            yield text.splitlines()[0]


def private_words(scope: ast.AST) -> Iterator[str]:
    for node in ast.iter_child_nodes(scope):
        is_name = isinstance(node, (ast.arg, *DEFINITIONS)) or isinstance(getattr(node, "ctx", None), ast.Store)
        name = next((getattr(node, field) for field in ("name", "id", "attr", "arg") if hasattr(node, field)), "")
        if is_name and name.strip("_") in WORDS:
            yield name
        short = isinstance(node, DEFINITIONS[1:]) and (node.end_lineno or 0) - node.lineno < 5
        if not short and not isinstance(node, (ast.Lambda, ast.comprehension)):
            yield from private_words(node)


def phrases(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from (match[0] for match in PHRASES.finditer(node.value))


@pytest.mark.parametrize("rule", [first_words, private_words, phrases])
def test_modules_have_no_private_english(rule: Callable[[ast.Module], Iterator[str]]) -> None:
    texts = {module: found for module, tree in modules() if (found := list(rule(tree)))}
    texts.pop("deploy/bug_report.py" if rule is phrases else "", None)  # nobody is a user's name
    assert texts == {}, "name the thing, with the negation at the verb (CONTRIBUTING.md)"


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


def test_internals_have_no_sections() -> None:
    names = {
        f"hpcgpu/{file.removesuffix('.py').removesuffix('/__init__')}/{name}".strip("/").replace("/", ".")
        for file, tree in modules()
        for name, _, text in documented(tree)
        if SECTION.search(text)
    } - public()
    assert names == set(), "internal: write one line; facts go to a second line, fields to comments beside them"


def test_public_objects_have_docstrings() -> None:
    assert {"hpcgpu.deploy.cluster.classes.SLURMGPUCluster", "hpcgpu.sim.gpu.SimGpu.asarray"} <= public()
    assert {"hpcgpu.deploy.cluster.classes.BatchGPUCluster.scale", BASE} <= public()
    assert "hpcgpu.deploy.cluster.cluster.GPUCluster.entry_point" not in public()
    assert all(inspect.getdoc(getattr(hpcgpu, name)) for name in hpcgpu.__all__)


def test_names_of_tests_have_at_most_60_characters() -> None:
    text = "\n".join(path.read_text() for path in sorted(TESTS.rglob("test_*.py")))
    assert re.findall(r"^ *(?:async )?def (test_\w{56,})", text, re.MULTILINE) == []
