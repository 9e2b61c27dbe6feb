"""The options as a signature and a numpydoc section, for help(), completion and notebooks."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import MISSING, Field
from inspect import Parameter, cleandoc
from textwrap import fill
from types import MappingProxyType
from typing import Any

from hpcgpu.model.limit import Limit
from hpcgpu.model.settings import options, user_name

# What may be given for each kind of option; of choices they are named.
TYPES: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("count", "number"), "int"),
        **dict.fromkeys(("bytes", "duration"), "int or str"),
        **dict.fromkeys(("limit", "device-limit", "host-limit"), "float, int or str"),
        **dict.fromkeys(("text",), "str"),
        **dict.fromkeys(("gpus", "port"), "int or str"),
        **dict.fromkeys(("texts", "lines"), "list of str"),
        "cores": "str or int",
        "nics": "str or list of str",
        "seconds": "float or str",
        "flag": "bool",
        "numbers": "dict of str to float",
        "environment": "dict of str to str",
    }
)
_GIVEN = re.compile(r"^\*\*given\n(?: +.*\n?)+", re.MULTILINE)
_SECTION = re.compile(r"^\w+\n-{3,}$", re.MULTILINE)


def parameters(without: Container[str] = ()) -> list[Parameter]:
    """Return a keyword for each option that is not among ``without``, by the users' names, with its default."""
    shown = (f for f in options() if user_name(f) not in without)
    return [Parameter(user_name(f), Parameter.KEYWORD_ONLY, default=default_of(f)) for f in shown]


def documented(text: str, base: str = "", without: Container[str] = ()) -> str:
    """Return a docstring in which the options stand in place of ``**given``.

    Parameters
    ----------
    text : str
        The docstring of a class.
    base : str
        That of the class whose sections it has before its own; empty for none.
    without : container of str
        Options that are left out, by the users' names.

    """
    text, base = cleandoc(text), cleandoc(base)
    own = found.start() if (found := _SECTION.search(text)) else len(text)
    before = base[found.start() :] if (found := _SECTION.search(base)) else ""
    whole = "\n\n".join(filter(None, (text[:own].strip(), before.strip(), text[own:].strip())))
    return _GIVEN.sub(lambda _: "".join(_entries(without)), f"{whole}\n")


def _entries(without: Container[str]) -> Iterator[str]:
    for f in options():
        if user_name(f) in without:
            continue
        default = default_of(f)
        said = "optional" if default in (None, (), {}) else f"default {default!r}"
        example = f", such as {f.metadata['example']}" if f.metadata["example"] else ""
        also = f"; also {', '.join(f.metadata['aliases'])}" if f.metadata["aliases"] else ""
        text = fill(f"{f.metadata['text']}{example}{also}", 96, initial_indent="    ", subsequent_indent="    ")
        yield f"{user_name(f)} : {type_of(f)}, {said}\n{text}\n"


def type_of(f: Field[Any]) -> str:
    """Return what may be given for an option, in numpydoc's words."""
    if choices := f.metadata["choices"]:
        return f"{{{', '.join(map(repr, choices))}}}"
    return TYPES[f.metadata["kind"]]


def default_of(f: Field[Any]) -> Any:  # noqa: ANN401 - the option's own type
    """Return the default as users would give it."""
    if f.default_factory is not MISSING:
        return dict(f.default_factory())
    return f.default.given if isinstance(f.default, Limit) else f.default
