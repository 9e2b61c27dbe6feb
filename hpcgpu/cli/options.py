"""The command line's options, made from the settings: each is declared once, in the model."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import Field
from typing import Any

import click

from hpcgpu.model.settings import options, user_name

Function = Callable[..., Any]
_MANY = ("texts", "lines", "environment", "numbers")


def setting_options(function: Function) -> Function:
    """Give a command an option for each setting; its arguments go through :func:`given_settings`."""
    return some_setting_options(*(user_name(f) for f in options()))(function)


def some_setting_options(*names: str) -> Callable[[Function], Function]:
    """Give a command an option for each of these settings."""

    def add(function: Function) -> Function:
        for field in reversed([f for f in options() if user_name(f) in names]):
            function = _option(field)(function)
        return function

    return add


def _option(field: Field[Any]) -> Callable[[Function], Function]:
    name, kind, text = user_name(field), field.metadata["kind"], field.metadata["text"]
    names = [f"--{n.replace('_', '-')}" for n in (name, *field.metadata["aliases"])]
    if kind == "flag":
        return click.option(f"{names[0]}/--no-{names[0][2:]}", name, default=None, help=text)
    if choices := field.metadata["choices"]:
        text += f" ({', '.join(choices)})"
    return click.option(*names, name, default=None, multiple=kind in _MANY, metavar="VALUE", help=text)


def given_settings(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was typed, for :func:`hpcgpu.deploy.settings.read`."""
    there = {name: value for name, value in arguments.items() if value is not None and value != ()}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in there.items()}


def debug_option(function: Function) -> Function:
    """Give a command ``--debug``."""

    def switch_on(_: click.Context, __: click.Parameter, wanted: bool) -> None:
        if wanted:
            os.environ["HPCGPU_DEBUG"] = "1"

    text = "Show tracebacks, and what Dask logs."
    return click.option("--debug", is_flag=True, expose_value=False, callback=switch_on, help=text)(function)
