"""Run a command: its exit code, and its errors as one message."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hpcgpu.errors import ConfigError, HpcGpuError, whole
from hpcgpu.host import log

if TYPE_CHECKING:
    import click

_OUTPUT = (errno.EPIPE, errno.EIO, errno.ENOSPC)  # the reader of a pipe is gone, the terminal is gone, the disk is full


def main() -> None:
    """Run the command ``hpcgpu``; errors are one message, a traceback only with ``--debug``.

    Exit code 2: a wrong option or setting, as in click; 1: a failure.
    """
    from hpcgpu.cli.commands import hpcgpu

    _run(hpcgpu, "hpcgpu")


def join(name: str = "python -m hpcgpu.worker", argv: Sequence[str] | None = None) -> None:
    """Run ``hpcgpu worker`` or ``dask gpu config`` by name, with this program's arguments if ``argv`` is None."""
    from hpcgpu.cli.commands import config, worker

    _run(config if name.endswith("config") else worker, name, argv)


def _run(command: click.Command, name: str, argv: Sequence[str] | None = None) -> None:
    """Run a command and exit with its code, also if no message can be written."""
    log.open_missing()
    code = _exit_code(command, name, argv)
    log.finish()
    sys.exit(code)


def _exit_code(command: click.Command, name: str, argv: Sequence[str] | None) -> int:
    import click

    try:
        return int(command(argv, prog_name=name, standalone_mode=False) or 0)
    except click.ClickException as e:
        if isinstance(e, click.NoSuchOption) and e.possibilities:
            del e.possibilities[1:]  # the nearest is first; click would sort them by name
        with contextlib.suppress(OSError):
            e.show()
        return e.exit_code
    except (click.Abort, KeyboardInterrupt):
        return 128 + signal.SIGINT
    except HpcGpuError as e:
        if os.environ.get("HPCGPU_DEBUG"):
            sys.__excepthook__(*sys.exc_info())
        from hpcgpu.cli.command import as_typed

        log.say(whole(e, as_typed if isinstance(e, ConfigError) else str))
        return 2 if isinstance(e, ConfigError) else 1
    except (OSError, RuntimeError) as e:
        from hpcgpu.host import process

        unwritten = f"the output could not be written: {e}" if getattr(e, "errno", None) in _OUTPUT else ""
        if not (message := unwritten or process.refused(e)):
            raise
        log.say(message)
        return 1
