"""The options as keywords: in the signature and docstring of a class, and with their types and defaults."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator
from dataclasses import MISSING, Field
from inspect import Parameter, cleandoc
from textwrap import fill
from typing import Any

from hpcgpu.config.values import KINDS
from hpcgpu.model.settings import Limit, options, user_name

_KEYWORDS = re.compile(r"^\*\*keywords\n(?: +.*\n?)+", re.MULTILINE)
_SECTION = re.compile(r"^\w+\n-{3,}$", re.MULTILINE)


def parameters(without: Container[str] = ()) -> list[Parameter]:
    """Return a keyword parameter with its default for each option that is not in ``without``, by user name."""
    shown = (f for f in options() if user_name(f) not in without)
    return [Parameter(user_name(f), Parameter.KEYWORD_ONLY, default=default_of(f)) for f in shown]


def documented(text: str, base: str = "", without: Container[str] = ()) -> str:
    """Put the options, except ``without``, in place of ``**keywords`` in a class's docstring, after its base's."""
    text, base = cleandoc(text), cleandoc(base)
    start = match.start() if (match := _SECTION.search(text)) else len(text)
    before = base[match.start() :] if (match := _SECTION.search(base)) else ""
    whole = "\n\n".join(filter(None, (text[:start].strip(), before.strip(), text[start:].strip())))
    return _KEYWORDS.sub(lambda _: "".join(_entries(without)), f"{whole}\n")


def _entries(without: Container[str]) -> Iterator[str]:
    for f in options():
        if user_name(f) in without:
            continue
        default = default_of(f)
        note = "optional" if default in (None, (), {}) else f"default {default!r}"
        example = f", such as {f.metadata['example']}" if f.metadata["example"] else ""
        also = f"; also {', '.join(f.metadata['aliases'])}" if f.metadata["aliases"] else ""
        text = fill(f"{f.metadata['text']}{example}{also}", 96, initial_indent="    ", subsequent_indent="    ")
        yield f"{user_name(f)} : {type_of(f)}, {note}\n{text}\n"


def type_of(f: Field[Any]) -> str:
    """Return an option's type as numpydoc shows it."""
    if choices := f.metadata["choices"]:
        return f"{{{', '.join(map(repr, choices))}}}"
    return KINDS[f.metadata["kind"]][1]


def default_of(f: Field[Any]) -> Any:  # the option's own type
    """Return an option's default as users would write it."""
    if f.default_factory is not MISSING:
        return dict(f.default_factory())
    return f.default.value if isinstance(f.default, Limit) else f.default
