"""Floor 7, the command line: thin, and quick to say what it can do."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from hpcgpu.errors import HpcGpuError

if TYPE_CHECKING:
    import click


def main() -> None:
    """Run the command ``hpcgpu``; errors are one message, a traceback only with ``--debug``."""
    from hpcgpu.cli.commands import hpcgpu

    _run(hpcgpu, "hpcgpu")


def join() -> None:
    """Run the command ``python -m hpcgpu.worker``."""
    from hpcgpu.cli.worker import worker

    _run(worker, "python -m hpcgpu.worker")


def _run(command: click.Command, name: str) -> None:
    try:
        command(prog_name=name)
    except HpcGpuError as e:
        if os.environ.get("HPCGPU_DEBUG"):
            raise
        print(f"hpcgpu: {e}", file=sys.stderr)
        sys.exit(1)
