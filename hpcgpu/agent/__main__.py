"""``python -m hpcgpu.agent DOCUMENT``: the rank program."""

from __future__ import annotations

import os
import sys

from hpcgpu.agent.rank import Rank
from hpcgpu.errors import HpcGpuError, WorldError
from hpcgpu.host import log
from hpcgpu.launch.environment import read_rank


def main(argv: list[str]) -> int:
    """Run one rank; return its exit code."""
    try:
        return Rank(argv[0], dict(os.environ)).run()
    except HpcGpuError as e:
        facts = read_rank(os.environ)
        if facts.rank == 0 or not isinstance(e, WorldError):
            log.say(str(e))
        if os.environ.get("HPCGPU_DEBUG"):
            sys.excepthook(*sys.exc_info())
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
