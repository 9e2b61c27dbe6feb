"""Run one rank: ``python -m hpcgpu.agent DOCUMENT``."""

from __future__ import annotations

import os
import sys
import time

from hpcgpu.agent.rank import Rank
from hpcgpu.errors import HpcGpuError, WorldError, whole
from hpcgpu.host import log, process
from hpcgpu.launch import read_rank

# Rank 0 reports errors that all ranks have. A launcher that ends all ranks with the first failed one would end rank 0
# before its report (mpirun of Open MPI 5.0.11, under load).
_RANK_0_SAYS_IT_S = 1.0


def main(document: str) -> int:
    """Run one rank; return its exit code. Rank 0 also writes the code to the exit file for its launcher."""
    number = read_rank(os.environ).rank
    if number == 0 and sys.flags.safe_path and not os.environ.get("PYTHONSAFEPATH"):
        log.say(f"modules in {os.getcwd()} are not imported: all users may write there, and would run code as you")
    code, path = 1, ""
    try:
        rank = Rank(document, dict(os.environ))
        path = rank.exit_file
        code = rank.run()
    except Exception as e:
        _say(e, number)
    if path:
        from hpcgpu.host import private

        private.write_exit_code(path, code)
    return code


def _say(error: Exception, number: int) -> None:
    """Log why a rank ends, with a traceback if the error is unexpected or HPCGPU_DEBUG is set."""
    message = whole(error) if isinstance(error, HpcGpuError) else process.refused(error)
    if number and isinstance(error, WorldError):
        time.sleep(_RANK_0_SAYS_IT_S)
    elif message:
        log.say(message)
    if not message or os.environ.get("HPCGPU_DEBUG"):
        sys.excepthook(type(error), error, error.__traceback__)


if __name__ == "__main__":
    log.open_missing()
    exit_code = main(sys.argv[1])
    log.finish()
    sys.exit(exit_code)
