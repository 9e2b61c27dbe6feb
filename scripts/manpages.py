"""Write a manual page for each command into build/man: ``man -l build/man/hpcgpu-run.1``."""

from __future__ import annotations

import sys
from pathlib import Path

from click_man.core import write_man_pages

from hpcgpu import __version__
from hpcgpu.cli.command import Command, example_lines
from hpcgpu.cli.commands import hpcgpu


def main(folder: Path) -> int:
    """Return the number of commands without a page."""
    folder.mkdir(parents=True, exist_ok=True)
    write_man_pages("hpcgpu", hpcgpu, version=__version__, target_dir=str(folder))
    missing = 0
    for name, command in hpcgpu.commands.items():
        page = folder / f"hpcgpu-{name}.1"
        missing += not page.is_file()
        if isinstance(command, Command) and page.is_file():
            lines = "\n".join(
                line.replace("\\", "\\\\").replace("-", "\\-") for line in example_lines(command.examples)
            )
            page.write_text(f"{page.read_text()}.SH EXAMPLES\n.nf\n{lines}\n.fi\n")
    print(f"{len(list(folder.glob('*.1')))} manual pages in {folder}")
    return missing


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
