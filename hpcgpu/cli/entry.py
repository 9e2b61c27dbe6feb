"""Run a command: its exit code, and its errors as one message."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence

from hpcgpu.errors import ConfigError, HpcGpuError, whole
from hpcgpu.host import log
from hpcgpu.light_typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any

    import click

# The options of ``hpcgpu bind`` without a value, by the names of bound_command.Options.
_BIND_FLAGS = {"--report": "report", "--dry-run": "dry_run", "--any": "unbound", "--all-visible": "all_visible"}
_INTERRUPTED = 128 + 2  # as a shell says of SIGINT
_OUTPUT = (errno.EPIPE, errno.EIO, errno.ENOSPC)  # the reader of a pipe is gone, the terminal is gone, the disk is full


def main() -> None:
    """Run the command ``hpcgpu``; errors are one message, a traceback only with ``--debug``.

    Exit code 2: a wrong option or setting, as in click; 1: a failure; 130: interrupted.
    """
    try:
        _main()
    except KeyboardInterrupt:  # while commands are imported, which takes seconds on some file systems
        sys.exit(_INTERRUPTED)


def _main() -> None:
    if options := _bind_options(sys.argv[1:]):
        log.open_missing()
        code = _bind(sys.argv[sys.argv.index("--") + 1 :], options)
        log.finish()
        sys.exit(code)
    from hpcgpu.cli.commands import hpcgpu

    _run(hpcgpu, "hpcgpu")


def _bind_options(argv: Sequence[str]) -> dict[str, str | bool]:
    """Return the options of ``hpcgpu bind [OPTIONS] -- COMMAND``; {} if click is to read them.

    Each rank of a job runs this command, and importing click and all commands takes 100 CPU ms.
    """
    if argv[:1] != ["bind"] or "--" not in argv:
        return {}
    options: dict[str, str | bool] = dict.fromkeys(_BIND_FLAGS.values(), False)
    left = iter(argv[1 : argv.index("--")])
    for option in left:
        name = _BIND_FLAGS.get(option, "")
        if not name and option != "--gpus":
            return {}
        options[name or "gpus"] = True if name else next(left, "")
    return options


def _bind(command: Sequence[str], options: dict[str, Any]) -> int:
    import gc

    gc.disable()  # a tenth of the CPU time, for a process that soon becomes another program
    from hpcgpu.cli import bound_command

    try:
        return bound_command.run(command, bound_command.Options(**options))
    except KeyboardInterrupt:
        return _INTERRUPTED
    except (HpcGpuError, OSError, RuntimeError) as e:
        return _code_of(e)


def join(name: str = "python -m hpcgpu.worker", argv: Sequence[str] | None = None) -> None:
    """Run ``hpcgpu worker`` or ``dask gpu config`` by name, with this program's arguments if ``argv`` is None."""
    from hpcgpu.cli.worker import config, worker

    _run(config if name.endswith("config") else worker, name, argv)


def _run(command: click.Command, name: str, argv: Sequence[str] | None = None) -> None:
    """Run a command and exit with its code, also if no message can be written."""
    log.open_missing()
    code = _exit_code(command, name, argv)
    log.finish()
    sys.exit(code)


def _exit_code(command: click.Command, name: str, argv: Sequence[str] | None) -> int:
    import contextlib

    import click

    from hpcgpu.config.values import as_typed

    before, HpcGpuError.form = HpcGpuError.form, as_typed
    try:
        return int(command(argv, prog_name=name, standalone_mode=False) or 0)
    except click.ClickException as e:
        if isinstance(e, click.NoSuchOption) and e.possibilities:
            del e.possibilities[1:]  # the nearest is first; click would sort them by name
        with contextlib.suppress(OSError):
            e.show()
        return e.exit_code
    except (click.Abort, KeyboardInterrupt):
        return _INTERRUPTED
    except (HpcGpuError, OSError, RuntimeError, ValueError) as e:
        return _code_of(e)
    finally:
        HpcGpuError.form = before


def _code_of(error: HpcGpuError | OSError | RuntimeError | ValueError) -> int:
    """Write the message of an error, and return the exit code; raise an error without one again."""
    if isinstance(error, HpcGpuError):
        if os.environ.get("HPCGPU_DEBUG"):
            sys.__excepthook__(*sys.exc_info())
        log.say(whole(error))
        return 2 if isinstance(error, ConfigError) else 1
    from hpcgpu.host import process

    unwritten = f"the output could not be written: {error}" if getattr(error, "errno", None) in _OUTPUT else ""
    if not (message := unwritten or process.refused(error)):
        raise error
    log.say(message)
    return 2 if isinstance(error, ValueError) else 1
