"""The command line's options, made from the settings: each is declared once, in the model."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import Field
from types import MappingProxyType
from typing import Any

import click

from hpcgpu.config.entry_points import unused
from hpcgpu.config.layers import BY_NAME
from hpcgpu.config.numpydoc import default_of
from hpcgpu.model.settings import options, user_name

Function = Callable[..., Any]
# Kinds of options that may be repeated, and how each value is written.
MANY: Mapping[str, str] = MappingProxyType(
    {"texts": "TEXT", "lines": "LINE", "nics": "NAME", "environment": "NAME=VALUE", "numbers": "NAME=NUMBER"}
)
_OPTION_NAME = re.compile(r"\b[a-z]+(?:_[a-z]+)+\b")
# Where a setting of the command line comes from, in plans and errors.
FROM = "option --{flag}"


def setting_options(entry_point: str) -> Callable[[Function], Function]:
    """Give a command an option for each setting; its arguments go through :func:`given_settings`.

    Those of which the command makes nothing are not in its help, and are refused where they are read.
    """
    return _setting_options(lambda _: True, hidden=frozenset(unused(entry_point)))


def some_setting_options(*names: str) -> Callable[[Function], Function]:
    """Give a command an option for each of these settings."""
    return _setting_options(lambda name: name in names)


def _setting_options(
    wanted: Callable[[str], bool], hidden: frozenset[str] = frozenset()
) -> Callable[[Function], Function]:
    def add(function: Function) -> Function:
        for field in reversed([f for f in options() if wanted(user_name(f))]):
            function = _option(field, hidden=user_name(field) in hidden)(function)
        return function

    return add


def _option(field: Field[Any], *, hidden: bool) -> Callable[[Function], Function]:
    name, kind = user_name(field), field.metadata["kind"]
    text = f"{_in_flags(field.metadata['text'])}{_example(field)}{_default(field)}"
    names = [flag(n) for n in (name, *field.metadata["aliases"])]
    if kind == "flag":
        return click.option(*_switches(names), name, default=None, help=text, hidden=hidden)
    choices, many = field.metadata["choices"], kind in MANY
    shown = "|".join(choices) or MANY.get(kind, "VALUE")
    complete = _sites if name == "site" else _starting(choices)
    return click.option(
        *names, name, default=None, multiple=many, metavar=shown, help=text, hidden=hidden, shell_complete=complete
    )


def _switches(names: Sequence[str]) -> Iterator[str]:
    """Yield the forms of a flag for click; dask-cuda says --enable-X and --disable-X."""
    yield f"{names[0]}/--no-{names[0][2:]}"
    for name in names:
        off = name.replace("--enable-", "--disable-", 1) if name.startswith("--enable-") else f"--no-{name[2:]}"
        if name != names[0]:
            yield f"{name}/{off}"
        elif off != f"--no-{name[2:]}":
            yield f" /{off}"


def _example(field: Field[Any]) -> str:
    such = f", such as {field.metadata['example']}" if field.metadata["example"] else ""
    return f"{such}; may be repeated" if field.metadata["kind"] in MANY else such


def _in_flags(text: str) -> str:
    """Return an option's text with other options as they are typed here."""
    return _OPTION_NAME.sub(lambda name: flag(name[0]) if name[0] in BY_NAME else name[0], text)


def flag(name: str) -> str:
    """Return an option as it is typed."""
    return f"--{name.replace('_', '-')}"


def _default(field: Field[Any]) -> str:
    """Return what an option is if it is not given; nothing where its text says what happens then."""
    default = default_of(field)
    if default in (None, (), {}):
        return ""
    shown = (
        {True: "on", False: "off"}[default]
        if field.metadata["kind"] == "flag"
        else f"{default:g}"
        if isinstance(default, float)
        else default
    )
    return f"  [default: {shown}]"


def _starting(words: Iterable[str]) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """Return what completes a word to one of these."""
    return lambda _, __, typed: [word for word in words if word.startswith(typed)]


def _sites(context: click.Context, parameter: click.Parameter, typed: str) -> list[str]:
    from hpcgpu.host.sites import site_files

    return _starting(sorted(site_files()))(context, parameter, typed)


def given_settings(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was typed, for :func:`hpcgpu.deploy.settings.read`."""
    there = {name: value for name, value in arguments.items() if value is not None and value != ()}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in there.items()}


def words_for(entry_point: str, given: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what was typed as the words of another command, without the options of which that makes nothing."""
    words: list[str] = []
    for name, value in given.items():
        if name in unused(entry_point):
            continue
        if isinstance(value, bool):
            words.append(flag(name) if value else flag(f"no_{name}"))
        else:
            words += [word for each in (value if isinstance(value, list) else [value]) for word in (flag(name), each)]
    return tuple(words)


def debug_option(function: Function) -> Function:
    """Give a command ``--debug``."""

    def switch_on(_: click.Context, __: click.Parameter, wanted: bool) -> None:
        if wanted:
            os.environ["HPCGPU_DEBUG"] = "1"

    text = "Show tracebacks, and what Dask logs."
    return click.option("--debug", is_flag=True, expose_value=False, callback=switch_on, help=text)(function)


def json_option(what: str) -> Callable[[Function], Function]:
    """Give a command that prints facts ``--json``, as the argument ``as_json``."""
    return click.option("--json", "as_json", is_flag=True, help=f"Print {what} as JSON.")
