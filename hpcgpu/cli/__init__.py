"""Floor 7, the command line: thin, and quick to say what it can do."""

from __future__ import annotations

import os
import sys

from hpcgpu.errors import HpcGpuError


def main() -> None:
    """Run the command ``hpcgpu``; errors are one message, a traceback only with ``--debug``."""
    from hpcgpu.cli.commands import hpcgpu

    try:
        hpcgpu(prog_name="hpcgpu")
    except HpcGpuError as e:
        if os.environ.get("HPCGPU_DEBUG"):
            raise
        print(f"hpcgpu: {e}", file=sys.stderr)
        sys.exit(1)
