"""The English of package and tests, as far as a test sees it."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterator

import pytest
from paths import PACKAGE, TESTS

DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
FIRST_WORDS = re.compile(r"(What|Who|Whoever|Whatever|Whether|Those|These|It|Such|Nothing|One (of|that|which))\b")
WORDS = {"found", "there", "own", "said", "words", "given", "wanted", "known", "asked", "told", "what", "those", "one"}
PHRASES = re.compile(r"\b([iI]s none|[aA]re none|cannot be had|no word|[nN]obody|of no use|as of now)\b")


@functools.cache
def modules() -> tuple[tuple[str, ast.Module], ...]:
    return tuple((str(p.relative_to(PACKAGE)), ast.parse(p.read_text())) for p in sorted(PACKAGE.rglob("*.py")))


def first_words(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        text = ast.get_docstring(node) if isinstance(node, (ast.Module, *DEFINITIONS)) else None
        if text and FIRST_WORDS.match(text):
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
    texts.pop("report/scrub.py" if rule is phrases else "", None)  # nobody is a user's name
    assert texts == {}, "name the thing, with the negation at the verb (CONTRIBUTING.md)"


def test_names_of_tests_have_at_most_60_characters() -> None:
    text = "\n".join(path.read_text() for path in sorted(TESTS.rglob("test_*.py")))
    assert re.findall(r"^ *(?:async )?def (test_\w{56,})", text, re.MULTILINE) == []
