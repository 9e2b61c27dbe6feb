"""Lines of pages and of help, read by the parser of the command line: nothing is run."""

import shlex

import click

from hpcgpu.cli.commands import hpcgpu


def check(line: str) -> None:
    """Raise for a line with ``hpcgpu`` in it that the command line would refuse as typed."""
    arguments = shlex.split(line, comments=True)
    ends = [i for i, word in enumerate(arguments) if word in ("|", ">", "&&", ";", "<")]
    arguments = arguments[: ends[0] if ends else None]
    if "hpcgpu" not in arguments:
        raise ValueError(f"no command hpcgpu in {line!r}")
    typed = arguments[arguments.index("hpcgpu") + 1 :]
    command: click.Command = hpcgpu
    name = "hpcgpu"
    while isinstance(command, click.Group) and typed and not typed[0].startswith("-"):
        name, *typed = typed
        subcommand = command.commands.get(name)
        if subcommand is None:
            raise ValueError(f"no command {name!r}: {line}")
        command = subcommand
    if typed not in (["--help"], ["--version"]):
        command.make_context(name, list(typed), help_option_names=["-h", "--help"])


def commands(group: click.Group = hpcgpu, before: str = "hpcgpu") -> dict[str, click.Command]:
    """Return all commands by the words that are typed."""
    by_line: dict[str, click.Command] = {}
    for name, command in group.commands.items():
        typed = f"{before} {name}"
        by_line |= commands(command, typed) if isinstance(command, click.Group) else {typed: command}
    return by_line
