"""The folders of this user's clusters on this machine, and the run of each."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from hpcgpu.deploy.jobs import Run
from hpcgpu.errors import ConfigError, HpcGpuError
from hpcgpu.host.scratch import home_of, sweep


def folders(node: str = "*", home: str | None = None) -> Iterator[Path]:
    """Yield the folders of this user's local clusters on a node, or on all that have the same ``home``, or TMPDIR."""
    for folder in home_of(home).glob(f"hpcgpu-client-{os.getuid()}-{node}-{'?' * 8}/*/"):
        with contextlib.suppress(FileNotFoundError):  # it is removed just now
            if folder.parent.lstat().st_uid == os.getuid():
                yield folder


def find(name: str) -> Run:
    """Return the run of a process on this machine, by name, job id or folder; ConfigError for none or several.

    Folders of dead processes are removed. A cluster with its own ``local_directory`` is found by that: a name with "/".
    """
    home = name if os.sep in name else None
    sweep(home_of(home))
    runs: list[Run] = []
    for folder in folders(os.uname().nodename, home):
        with contextlib.suppress(OSError, HpcGpuError):  # not ready yet, being removed, or of another version
            runs.append(Run.open(folder))
    matches = [run for run in runs if home or name in run.names]
    if len(matches) != 1:
        listed = ", ".join(f"{run.name} (job_id {run.head.id})" for run in runs if run.head) or "none"
        raise ConfigError(
            f"{len(matches)} local clusters have the {'folder' if home else 'name'} {name!r}; give the name or job_id "
            f"of one below {home_of(None)} (TMPDIR), or its local_directory, with '/'; in {home_of(home)}: {listed}"
        )
    return matches[0]
