"""The English of package and tests, as far as a test sees it; the numbers of what is not done only fall."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from paths import PACKAGE, TESTS

DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
FIRST_WORDS = re.compile(r"(What|Who|Whoever|Whatever|Whether|Those|These|It|Such|Nothing|One (of|that|which))\b")
WORDS = {"found", "there", "own", "said", "words", "given", "wanted", "known", "asked", "told", "what", "those", "one"}
PHRASES = re.compile(r"\b([iI]s none|[aA]re none|cannot be had|no word|[nN]obody|of no use|as of now)\b")
# By room: what is not done; words as names in scopes of over five lines. Lower a number as soon as there is less.
FIRST_WORDS_LEFT: dict[str, int] = {
    **{"deploy/cluster": 1, "deploy/jobs": 3, "model": 4, "plan/jobs": 4, "spill/state": 3, "spill/storage": 6},
    **{"spill/store": 1, "spill/values": 2},
}
WORDS_LEFT: dict[str, int] = {
    **{"batch": 30, "config": 89, "deploy/cluster": 7, "deploy/jobs": 7, "host": 40, "launch": 3, "model": 19},
    **{"pictures": 20, "plan/binding": 41, "plan/doctor": 26, "plan/jobs": 2, "plan/views": 2},
    **{"topology": 18, "units": 2},
}
PHRASES_LEFT: dict[str, int] = {
    **{"batch": 3, "deploy/cluster": 2, "deploy/jobs": 1, "host": 6, "model": 4, "pictures": 3, "plan/binding": 3},
    **{"plan/jobs": 2, "plan/views": 3, "topology": 4},
}
LONG_NAMES_LEFT: dict[str, int] = {
    **{"gpu/spill": 1, "lab": 17, "pbs": 1, "process/deploy": 18, "process/launch": 3, "unit/batch": 7, "unit/cli": 1},
    **{"unit/config": 11, "unit/deploy": 19, "unit/host": 11, "unit/launch": 5, "unit/model": 1, "unit/pictures": 3},
    **{"unit/plan": 17, "unit/sim": 2, "unit/spill": 33, "unit/topology": 5},
}


@functools.cache
def modules() -> tuple[tuple[str, ast.Module], ...]:
    """Return each module of the package with its room: ``config``, ``deploy/jobs``."""
    paths = {path: path.relative_to(PACKAGE).with_suffix("").parts for path in sorted(PACKAGE.rglob("*.py"))}
    depths = {p: 2 if parts[0] in ("deploy", "plan", "spill") and len(parts) > 2 else 1 for p, parts in paths.items()}
    return tuple(("/".join(parts[: depths[p]]), ast.parse(p.read_text())) for p, parts in paths.items())


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


@pytest.mark.parametrize(
    ("rule", "left"), [(first_words, FIRST_WORDS_LEFT), (private_words, WORDS_LEFT), (phrases, PHRASES_LEFT)]
)
def test_rooms_have_no_more_private_english(rule: Callable[[ast.Module], Iterator[str]], left: dict[str, int]) -> None:
    found: dict[str, list[str]] = {}
    for room, tree in modules():
        found.setdefault(room, []).extend(rule(tree))
    more = {room: texts for room, texts in found.items() if len(texts) > left.get(room, 0)}
    assert more == {}, "name the thing, with the negation at the verb (CONTRIBUTING.md); do not raise the number"


def test_folders_have_no_more_long_names_of_tests() -> None:
    counts: Counter[str] = Counter()
    for path in sorted(TESTS.rglob("test_*.py")):
        names = re.findall(r"^ *(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE)
        parts = path.relative_to(TESTS).parts[:-1]
        counts["/".join(parts[:2])] += sum(len(name) > 60 for name in names)
    assert {room: n for room, n in counts.items() if n > LONG_NAMES_LEFT.get(room, 0)} == {}, "at most 60 characters"
