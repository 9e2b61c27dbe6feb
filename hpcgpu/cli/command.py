"""Commands with options made from the settings, which the model declares once, and help with groups and examples.

Together: click asks a command's class for the options that the functions make of settings.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import Field
from functools import partial
from typing import Any

import click

from hpcgpu.config.entry_points import unused
from hpcgpu.config.keywords import default_of
from hpcgpu.config.values import flag
from hpcgpu.errors import ConfigError, opt
from hpcgpu.model.settings import BY_NAME, GROUPS, options, user_name
from hpcgpu.report.table import Table

Function = Callable[..., Any]
FILE = click.Path(readable=False)  # any text; the shell completes names of files
# Kinds of options that may be repeated, and how each value is written.
MANY = {"texts": "TEXT", "lines": "LINE", "nics": "NAME", "environment": "NAME=VALUE", "numbers": "NAME=NUMBER"}
_OPTION_NAME = re.compile(r"\b[a-z]+(?:_[a-z]+)+\b")
_GROUP_OF = {name: group for group, names in GROUPS.items() for name in names}


class _WithExamples(click.Command):
    """A command with ``--debug`` and ``examples``: lines to type, each with its effect, or ""."""

    def __init__(self, *args: Any, examples: Mapping[str, str] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.examples = examples or {}
        debug: dict[str, Any] = {"help": "Show tracebacks, and what Dask logs.", "is_flag": True, "expose_value": False}
        debug["callback"] = lambda _, __, on: os.environ.update({"HPCGPU_DEBUG": "1"} if on else {})
        self.params.append(click.Option(["--debug"], **debug))

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples; called by click."""
        if self.examples:
            with formatter.section("Examples"):
                for line in example_lines(self.examples):
                    formatter.write(f"{'':{formatter.current_indent}}{line}\n")
        super().format_epilog(ctx, formatter)


class Command(_WithExamples):
    """A command with its options in groups."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, the command's own first; called by click."""
        params = [p for p in self.get_params(ctx) if isinstance(p, click.Option)]  # arguments stand in the usage line
        rows = [(_GROUP_OF.get(p.name or "", "Options"), row) for p in params if (row := p.get_help_record(ctx))]
        for group in ("Options", *GROUPS):
            if lines := [row for name, row in rows if name == group]:
                with formatter.section(group):
                    formatter.write_dl(lines)


command = partial(click.command, cls=Command)


class Group(_WithExamples, click.Group):
    """Commands below headings, in the order in which they are usually needed."""

    command_class = Command

    def __init__(self, *args: Any, headings: Mapping[str, Sequence[str]] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.headings = headings or {}

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands; called by click."""
        shown = {name for name, command in self.commands.items() if not command.hidden}
        others = shown.difference(*self.headings.values())
        width = max(map(len, shown))
        for heading, names in {**self.headings, "Commands": sorted(others)}.items():
            if names:
                helps = (self.commands[name].get_short_help_str(formatter.width - width - 6) for name in names)
                with formatter.section(heading):
                    formatter.write_dl([(f"{name:{width}}", text) for name, text in zip(names, helps, strict=True)])


class _Aliased(click.Option):
    """An option of several names, by which one value may be typed."""

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        """Have the value of each name kept by itself; called by click."""
        for name in self.opts:
            parser.add_option(obj=self, opts=[name], dest=name)

    def consume_value(self, ctx: click.Context, opts: Mapping[str, Any]) -> tuple[Any, Any]:
        """Return the value that was typed; called by click."""
        typed = {name: opts[name] for name in self.opts if name in opts}
        if len(set(typed.values())) > 1:
            by = " and ".join(f"by option {name}" for name in typed)
            raise ConfigError(f"{opt(str(self.name), None)} is given twice: {by}; give it once")
        return super().consume_value(ctx, dict(zip([str(self.name)], typed.values(), strict=False)))


def example_lines(examples: Mapping[str, str]) -> Iterator[str]:
    """Yield lines to type, each with its effect as a comment, in one column."""
    width = max(map(len, examples), default=0)
    for line, about in examples.items():
        yield f"{line:{width}}  # {about}" if about else line


def setting_options(entry_point: str = "", *names: str) -> Callable[[Function], Function]:
    """Give a command an option for each (of these) settings; its arguments go through :func:`typed_settings`.

    Options without effect in the command are not in its help, and are refused where they are read.
    """

    def add(function: Function) -> Function:
        for field in reversed([f for f in options() if not names or user_name(f) in names]):
            function = _option(field, hidden=user_name(field) in unused(entry_point))(function)
        return function

    return add


def _option(field: Field[Any], *, hidden: bool) -> Callable[[Function], Function]:
    name, kind, example = user_name(field), field.metadata["kind"], field.metadata["example"]
    many = kind in MANY
    text = _OPTION_NAME.sub(lambda match: flag(match[0]) if match[0] in BY_NAME else match[0], field.metadata["text"])
    text += f"{f', such as {example}' if example else ''}{'; may be repeated' if many else ''}{_default(field)}"
    names = [flag(n) for n in (name, *field.metadata["aliases"])]
    if kind == "flag":
        return click.option(*_switches(names), name, default=None, help=text, hidden=hidden)
    choices = field.metadata["choices"]
    metavar = "|".join(choices) or MANY.get(kind, "VALUE")

    complete = completion(lambda: _sites() if name == "site" else choices)
    cls = _Aliased if names[1:] and not many else click.Option
    options = {"metavar": metavar, "help": text, "hidden": hidden, "shell_complete": complete}
    return click.option(*names, name, cls=cls, default=None, multiple=many, **options)


def completion(words: Callable[[], Iterable[str]]) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """Return a function for click that completes one of these words."""
    return lambda _, __, typed: [word for word in words() if word.startswith(typed)]


def _sites() -> list[str]:
    from hpcgpu.deploy.site_files import site_files

    return sorted(site_files())


SITE = completion(_sites)


def _switches(names: Sequence[str]) -> Iterator[str]:
    """Yield the forms of a flag for click; dask-cuda has --enable-X and --disable-X."""
    yield f"{names[0]}/--no-{names[0][2:]}"
    for name in names:
        off = name.replace("--enable-", "--disable-", 1) if name.startswith("--enable-") else f"--no-{name[2:]}"
        if name != names[0]:
            yield f"{name}/{off}"
        elif off != f"--no-{name[2:]}":
            yield f" /{off}"


def _default(field: Field[Any]) -> str:
    """Return an option's default for its help; "" if its text describes the default."""
    default = default_of(field)
    if default in (None, (), {}):
        return ""
    if field.metadata["kind"] == "flag":
        default = "on" if default else "off"
    return f"  [default: {f'{default:g}' if isinstance(default, float) else default}]"


def typed_settings(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that were typed, for :func:`hpcgpu.deploy.settings.read`."""
    typed = {name: value for name, value in arguments.items() if value is not None and value != ()}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in typed.items()}


def json_option(facts: str) -> Callable[[Function], Function]:
    """Give a command that prints facts ``--json``, as the argument ``as_json``."""
    return click.option("--json", "as_json", is_flag=True, help=f"Print {facts} as JSON.")


def show_text(text: Table | str, facts: Any = None) -> None:
    """Print facts as JSON if there are any, else a text or a table: in a pipe each row is one line."""
    if isinstance(text, Table):
        colours = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        text = text.to_text(shutil.get_terminal_size((0, 0)).columns, colours=colours)
    click.echo(text if facts is None else f"{json.dumps(facts, indent=2)}\n", nl=False)
