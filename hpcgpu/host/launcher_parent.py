"""The parent of srun or mpirun: ``python -m hpcgpu.host.launcher_parent FILE PID`` waits, and exits as the run did.

A launcher's exit code does not show how the run ended: Open MPI 5.0.11's mpirun returns 0 after the loss of a node,
with the flag by which ranks survive each other. So rank 0 writes its exit code at its end; without it no run is a
success. This program lives as long as the run, so it is small (10 MB).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Mapping

from hpcgpu.errors import LaunchError
from hpcgpu.host import log

# Forwarded, unless they are ignored: by nohup, in the background of a shell, in the scripts of our jobs.
_ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
# Always forwarded: the launcher forwards them to the ranks. A job's script ignores them until the launcher listens.
_WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)
# Interval of checks whether rank 0 has ended and its launcher has not; the launcher needs a few seconds more.
_PATIENCE_S = 15.0


def launch(argv: tuple[str, ...], env: Mapping[str, str], path: str, *, kills: bool = False) -> None:
    """Start a launcher with exit file ``path`` and become its parent under this pid, for good; or raise LaunchError.

    One that ``kills`` its ranks at SIGTERM never gets it (mpirun of Open MPI 6.0.0rc2, at once and by SIGKILL): Slurm
    signals all processes of a job that it cancels, and rank 0 is to end the run. It unblocks signals in its ranks.
    """
    import subprocess

    from hpcgpu.host import private, process

    parent = os.getpid()
    waited = {signal.SIGCHLD, *_WARNINGS, *(s for s in _ENDS if signal.getsignal(s) != signal.SIG_IGN)}
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it was ignored, the end would go unnoticed
    before = signal.pthread_sigmask(signal.SIG_BLOCK, waited)

    def first() -> None:
        process.die_with_parent(parent, signal.SIGINT if kills else signal.SIGTERM)
        signal.pthread_sigmask(signal.SIG_SETMASK, {*before, signal.SIGTERM} if kills else before)

    log.flush()
    try:  # all as it would be if this process became the launcher
        child = subprocess.Popen(argv, env=dict(env), preexec_fn=first, close_fds=False, restore_signals=False)
    except OSError as e:
        private.remove_exit_file(path)
        raise LaunchError(f"the ranks could not be started ({e}): python and launcher say what starts them") from e
    os.execv(sys.executable, process.python_argv("hpcgpu.host.launcher_parent", path, str(child.pid), "kills" * kills))


def wait(pid: int, path: str, patience_s: float = _PATIENCE_S, *, kills: bool = False) -> int:
    """Return a launcher's exit code, negative for a signal; forward the signals that :func:`launch` blocked.

    A launcher that goes on after rank 0's end waits for a stopped rank: it gets SIGTERM, then SIGKILL, and 0 is
    returned.
    """
    forces, overdue = [signal.SIGINT if kills else signal.SIGTERM, signal.SIGKILL], False
    # No sigtimedwait: stopped for longer than its timeout and continued, it returns garbage (CPython 3.11.7).
    waited = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM}) & {signal.SIGCHLD, *_WARNINGS, *_ENDS}
    signal.setitimer(signal.ITIMER_REAL, patience_s, patience_s)
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            signal.setitimer(signal.ITIMER_REAL, 0)
            return os.waitstatus_to_exitcode(status) if len(forces) == 2 else 0
        heard = signal.sigwaitinfo({signal.SIGALRM, *waited})
        if heard.si_signo == signal.SIGALRM:
            ended = os.path.exists(path)  # pathlib is 3 MB
            if ended and overdue and forces:
                os.kill(pid, forces.pop(0))
            overdue = ended
            continue
        # Above 0 it is the kernel's own (sigaction(2)): a terminal's, which the launcher has got, too, and would
        # take a second one for impatience.
        if heard.si_signo != signal.SIGCHLD and heard.si_code <= 0:
            to = [(pid, heard.si_signo)]
            if kills and heard.si_signo == signal.SIGTERM:
                from hpcgpu.host import process  # not before: 3 MB

                ranks = [child.pid for child in process.children(pid) if "PMIX_RANK" in child.environ]
                to = [(rank, heard.si_signo) for rank in ranks] or [(pid, signal.SIGINT)]
            for process_id, sig in to:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process_id, sig)


def main(path: str, pid: int, kills: str) -> int:
    """Wait for the launcher; return the run's exit code."""
    code = wait(pid, path, kills=bool(kills))
    from hpcgpu.host import private  # not before: 3 MB

    try:
        if code < 0:  # it was killed: no success, whatever has been written before
            return 128 - code
        run_code = private.read_exit_code(path, 0.0 if code else private.SEEN_S)
        if run_code is not None:
            return run_code
        if code == 0:
            log.say(
                "the run has not ended, though the launcher says 0: rank 0 has not written how it ended. A node, "
                "or the launcher's daemon there, was lost"
            )
            return os.EX_SOFTWARE
        return code
    finally:
        private.remove_exit_file(path)


if __name__ == "__main__":
    exit_code = main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
    log.finish()
    sys.exit(exit_code)
