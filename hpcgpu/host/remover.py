"""Remove a run's private folder once all processes that hold its lock have ended, however they ended.

After a signal a launcher gives its ranks less time than an orderly end takes (0.9 s with Open MPI 5.0.11), and no rank
is left to clean up. So this process has its own session, no output, and no parent that waits for it. It is run by its
path, without site-packages and with imports of built-in modules only, because it waits as long as the run, on each
node: shutil, signal and contextlib would bring 107 look-ups in the environment to 133 (Python 3.11).
"""

from __future__ import annotations

import fcntl
import os
import sys
import time

# A killed process leaves the kernel's tables a moment later, and may write until then.
_TRIES, _AGAIN_S = 100, 0.1
# The variable with the folder of the copy of Python from which a rank runs, and the descriptor of its lock (stage.sh).
STAGED_IN, _STAGE_LOCK = "HPCGPU_STAGED_IN", 9
_LEAVE_TRIES = 200  # 20 s: a copy has tens of thousands of files


def start(lock: str, *beside: str) -> None:
    """Start the remover of the folder of ``lock``, which this process holds, and of ``beside``; or LaunchError."""
    from hpcgpu.host import run
    from hpcgpu.model import Command

    remover = (sys.executable, "-I", "-S", os.path.abspath(__file__), lock, *beside)
    # a batch system signals all processes of a job: what the shell ignores, its programs ignore
    shell = run.start(Command(("sh", "-c", 'trap "" TERM INT HUP; "$@" &', "sh", *remover)))
    os.waitpid(shell.pid, 0)  # it ends at once; the remover has no parent of ours


def leave(stage: str) -> None:
    """Let go of the copy of Python that this process runs from, and wait until its remover, which needs it, is done.

    A batch system ends all processes of a job's step after its ranks, the remover too.
    """
    try:
        if os.path.sameopenfile(_STAGE_LOCK, file := os.open(os.path.join(stage, ".lock"), os.O_RDONLY)):
            os.close(_STAGE_LOCK)
        os.close(file)
    except OSError:
        return  # it was removed already
    for _ in range(_LEAVE_TRIES):
        if not os.path.isdir(stage):
            break
        time.sleep(_AGAIN_S)


def main(lock: str, *beside: str) -> None:
    """Wait for the lock, then remove its folder, and the folders ``beside``, which have no lock."""
    os.closerange(3, 1 << 20)  # what programs inherit, perhaps the lock itself
    os.chdir("/")
    try:
        file = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return  # the run has ended in order
    fcntl.flock(file, fcntl.LOCK_EX)
    for folder in beside:
        remove_tree(folder)
    remove(os.path.dirname(lock), file)


def remove(folder: str, lock: int) -> None:
    """Remove a folder whose lock is held, the lock last, then close the lock: until then other processes can go on."""
    remove_tree(folder, spared=".lock")
    remove_tree(folder)
    os.close(lock)
    for _ in range(_TRIES):
        if not os.path.isdir(folder):
            break
        remove_tree(folder)
        time.sleep(_AGAIN_S)


def remove_tree(top: str, spared: str = "") -> None:
    """Remove a folder as far as possible, but for the file ``spared`` in it; links are removed, not followed."""
    try:
        for path, folders, files, folder in os.fwalk(top, topdown=False):
            for name in files + folders:
                if path != top or name != spared:
                    _remove(name, folder)
        os.rmdir(top)
    except OSError:  # it is gone, or another process writes into it
        return


def _remove(name: str, folder: int) -> None:
    """Remove a file, a link or an empty folder, if possible."""
    for remove in (os.unlink, os.rmdir):
        try:
            remove(name, dir_fd=folder)
        except OSError:  # a folder, or a name that another process has removed
            continue
        return


if __name__ == "__main__":
    main(*sys.argv[1:])
