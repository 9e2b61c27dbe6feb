"""``python -m hpcgpu.agent DOCUMENT``: the rank program."""

from __future__ import annotations

import os
import sys
import time

from hpcgpu.agent.rank import Rank
from hpcgpu.errors import HpcGpuError, WorldError, whole
from hpcgpu.host import log, process
from hpcgpu.launch.environment import read_rank

# Rank 0 says what all ranks know. A launcher that ends all ranks with the first that fails would end it before
# it has spoken (mpirun of Open MPI 5.0.11, under load).
_RANK_0_SAYS_IT_S = 1.0


def main(document: str) -> int:
    """Run one rank; return its exit code, which rank 0 also writes where whatever launched it looks."""
    rank = read_rank(os.environ).rank
    if rank == 0 and sys.flags.safe_path and not os.environ.get("PYTHONSAFEPATH"):
        log.say(f"modules in {os.getcwd()} are not found: everybody may write there, and would run code as you")  # noqa: PTH109
    code = _run(document, rank)
    if rank == 0:
        from hpcgpu.config.bootstrap import read_bootstrap_settings
        from hpcgpu.host import exit_file

        if path := read_bootstrap_settings(document).exit_file:
            exit_file.write(path, code)
    return code


def _run(document: str, rank: int) -> int:
    try:
        return Rank(document, dict(os.environ)).run()
    except HpcGpuError as e:
        if rank == 0 or not isinstance(e, WorldError):
            log.say(whole(e))
        else:
            time.sleep(_RANK_0_SAYS_IT_S)
        if os.environ.get("HPCGPU_DEBUG"):
            sys.excepthook(*sys.exc_info())
    except Exception as e:
        if words := process.refused(e):
            log.say(words)
        if not words or os.environ.get("HPCGPU_DEBUG"):
            sys.excepthook(*sys.exc_info())  # nobody has foreseen it
    return 1


if __name__ == "__main__":
    log.open_missing()
    exit_code = main(sys.argv[1])
    log.finish()
    sys.exit(exit_code)
