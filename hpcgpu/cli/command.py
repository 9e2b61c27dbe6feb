"""Commands whose help has the options in groups, with their defaults, and examples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click

from hpcgpu.model.settings import GROUPS

_OWN = "Options"
_GROUP_OF = {name: group for group, names in GROUPS.items() for name in names}
_ORDER = (_OWN, *GROUPS)


class _WithExamples(click.Command):
    """A command with ``examples``: lines to type, each with what it does, or empty."""

    def __init__(self, *args: Any, examples: Mapping[str, str] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.examples = examples or {}

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Called by click."""
        if self.examples:
            with formatter.section("Examples"):
                for line in example_lines(self.examples):
                    formatter.write(f"{'':{formatter.current_indent}}{line}\n")
        super().format_epilog(ctx, formatter)


class Command(_WithExamples):
    """A command with its options in groups."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Called by click."""
        shown = [p for p in self.get_params(ctx) if isinstance(p, click.Option)]  # arguments stand in the usage line
        rows = [(_GROUP_OF.get(p.name or "", _OWN), row) for p in shown if (row := p.get_help_record(ctx))]
        for group in _ORDER:
            if ours := [row for name, row in rows if name == group]:
                with formatter.section(group):
                    formatter.write_dl(ours)


class Group(_WithExamples, click.Group):
    """Commands below headings, in the order in which they are usually needed."""

    command_class = Command

    def __init__(self, *args: Any, headings: Mapping[str, Sequence[str]] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.headings = headings or {}

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Called by click: those below headings first."""
        known = [name for names in self.headings.values() for name in names if name in self.commands]
        return [*known, *(name for name in super().list_commands(ctx) if name not in known)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Called by click."""
        names = self.list_commands(ctx)
        below = {name: heading for heading, ours in self.headings.items() for name in ours}
        width = max(map(len, names), default=0)
        room = formatter.width - width - 6
        for heading in (*self.headings, "Commands"):
            rows = [
                (f"{n:{width}}", self.commands[n].get_short_help_str(room))
                for n in names
                if below.get(n, "Commands") == heading
            ]
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows)


def example_lines(examples: Mapping[str, str]) -> Iterator[str]:
    """Return lines to type, each with what it does as a comment, in one column."""
    width = max(map(len, examples), default=0)
    for line, about in examples.items():
        yield f"{line:{width}}  # {about}" if about else line
