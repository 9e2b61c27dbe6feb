"""The session folder of the mpirun that this process is about to become."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

# Where Open MPI 5.0.11 makes it: its own option, then what PMIx takes for temporary files.
_BASES = ("PRTE_MCA_prte_tmpdir_base", "TMPDIR", "TEMP", "TMP")


def clear(name: str, environ: Mapping[str, str]) -> None:
    """Remove what a killed mpirun of this process's pid left: it is nobody's any more.

    Parameters
    ----------
    name : str
        Of the folder, with ``{pid}`` in it; empty: there is none.
    environ : mapping of str to str
        What mpirun is going to see.

    """
    if name:
        base = next((environ[variable] for variable in _BASES if environ.get(variable)), "/tmp")  # noqa: S108
        shutil.rmtree(Path(base, name.format(pid=os.getpid())), ignore_errors=True)
