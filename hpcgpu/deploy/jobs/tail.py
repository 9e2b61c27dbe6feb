"""The end of a job's log, for errors."""

from __future__ import annotations

from pathlib import Path

_TAIL_LINES = 30


def tail(log: Path, *, kept: bool = True) -> str:
    """Return the end of a log for an error, with its path where the log is ``kept`` when the error is read."""
    name = f"its log {log}" if kept else "its log (log_directory= keeps it)"
    try:
        lines = log.read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return (
            f"{name} is not there: it had not begun, or its node could not write there (log_directory= takes a "
            "folder that all nodes see)"
        )
    except OSError as e:
        return f"{name} cannot be read ({e.strerror})"
    if not lines:
        return f"{name} is empty"
    shown = "\n".join(f"  {line}" for line in lines[-_TAIL_LINES:])
    return f"the end of {name}:\n{shown}"
