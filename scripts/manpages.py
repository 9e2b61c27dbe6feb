"""Write a manual page for each command into FOLDER/man1: ``MANPATH=build/man man hpcgpu-run``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import click
from click_man.core import write_man_pages

from hpcgpu import __version__
from hpcgpu.cli.command import Command, Group, example_lines
from hpcgpu.cli.commands import hpcgpu


def main(folder: Path) -> str | None:
    """Return what is wrong, if anything: commands without a page."""
    pages = folder / "man1"
    pages.mkdir(parents=True, exist_ok=True)
    write_man_pages("hpcgpu", hpcgpu, version=__version__, target_dir=str(pages))
    missing = []
    for name, command in _all("hpcgpu", hpcgpu):
        page = pages / f"{name}.1"
        if not page.is_file():
            missing.append(name)
        elif isinstance(command, (Command, Group)):
            lines = "\n".join(
                line.replace("\\", "\\\\").replace("-", "\\-") for line in example_lines(command.examples)
            )
            page.write_text(f"{page.read_text()}.SH EXAMPLES\n.nf\n{lines}\n.fi\n")
    print(f"{len(list(pages.glob('*.1')))} manual pages in {pages}")
    return f"no manual page for {', '.join(missing)}" if missing else None


def _all(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    """Yield a command and those below it that are not hidden, as click_man has it, each with the name of its page."""
    if command.hidden:
        return
    yield name, command
    if isinstance(command, click.Group):
        for below, each in command.commands.items():
            yield from _all(f"{name}-{below}", each)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
