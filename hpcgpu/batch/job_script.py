"""The scripts of jobs: the user's options and ours, and the lines below them, the same for all batch systems.

Together: a script is options, checked words and the lines below them; each batch system calls all three.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from hpcgpu.errors import ConfigError, opt
from hpcgpu.model import JobSpec
from hpcgpu.model.allocation import DOCUMENT

_WHERE = f"{opt('job_extra_directives', None)} or {opt('job_directives_skip', None)}:"
NUMBER_OF_JOBS = f"how many jobs there are is said by {opt('nodes')}, or by scale() with {opt('shape', 'elastic')}"
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class Directive:
    """One option of a script; ConfigError for a text that no line can carry."""

    key: str  # its name: --constraint
    text: str  # in the script

    def __post_init__(self) -> None:
        _refuse_control(self.text, self.key)


def script_body(spec: JobSpec, before: tuple[str, ...] = (), index: str = "") -> tuple[str, ...]:
    """Return the script below its options, with the command's exit code; ``index`` is the array index's variable."""
    command = shlex.join(spec.argv)
    document = f"{DOCUMENT}={shlex.quote(spec.document)} " if spec.document else ""
    if not (spec.exit_file or spec.warn_s):
        return (*before, *spec.prologue, f"{document}{command}", "")
    # A bash that SIGTERM ends would write 0 to the file (5.2). So it catches the signal, in the prologue to end with
    # 143.
    file = exit_file(spec, index)
    record = (f"trap {shlex.quote(f'code=$?; umask 77; echo $code > {file}')} EXIT",) if spec.exit_file else ()
    first = (*record, "trap 'exit 143' TERM", "trap : USR1")
    return (*before, *first, *spec.prologue, *_waited_for(f"{document}exec {command}"), "")


def exit_file(spec: JobSpec, index: str) -> str:
    """Return bash code for the exit file of a job, or of each element of its array."""
    return shlex.quote(spec.exit_file) + (f'."${index}"' if spec.count > 1 else "")


def _waited_for(command: str) -> tuple[str, ...]:
    """Return shell lines that run ``exec …``, wait for its end, and forward the batch system's SIGUSR1 to it.

    Only the script gets that warning (Slurm's --signal=B:), and bash handles it only in wait and read, not while a
    command runs in the foreground. After a caught signal wait forgets the exit code of a command that ends meanwhile
    (bash 5.2.15: 255 in one of nine runs), so a second bash waits, catches nothing, and tells the first. SIGTERM is not
    forwarded: the batch system sends it to the ranks too, and a srun that gets one kills them at once (Slurm 22.05.8).
    """
    return (
        "{",  # read as a whole, so that a command that reads the script's stdin cannot eat the rest of it
        "    exec {out}>&1",
        "    job= warned=",
        "    trap : TERM",
        """    trap 'warned=1; kill -USR1 $job 2>/dev/null || :' USR1""",
        "    exec {told}< <(",
        # Caught, not ignored, also above: the command is to have SIGTERM's default.
        "        trap : TERM USR1",
        "        (",
        # Ignored until srun, mpirun or the rank itself listens: an early warning must not end it.
        "            trap '' USR1",
        '            echo "$BASHPID"',
        f"""            {command} >&"$out" {{out}}>&-""",
        '        ) && echo 0 || echo "$?"',  # both: a prologue may have said `set -e`
        "    )",
        "    exec {out}>&-",
        "    read -r job <&$told",
        '    [ -z "$warned" ] || kill -USR1 "$job" 2>/dev/null || :',  # it came before it was known whose it is
        # A signal that comes just before read waits is looked at when it returns (bash 5.2.15, under load).
        # And one whose time is over may have taken a part of the line: 0, and then there is only the line's end.
        "    code=",
        "    until read -r -t 5 part <&$told; ended=$?; code+=$part; ((ended <= 128)); do :; done",
        '    exit "${code:-137}"',  # no exit code was told: the waiting bash was killed
        "}",
    )


def options_in(text: str) -> Iterator[tuple[str, str | None]]:
    """Yield (option, value) of the user's text: ``--a=b``, ``-a b``, ``-ab``, ``--flag``; or raise ConfigError."""
    _refuse_control(text, "job_extra_directives")
    try:
        parts = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"{_WHERE} {text!r} is not an option of the batch system: {error}") from error
    if not parts or not parts[0].startswith("-") or parts[0] in ("-", "--"):
        raise ConfigError(
            f"{_WHERE} {text!r} is not an option of the batch system; allowed: '--constraint=a100', '-C a100'"
        )
    option: str | None = None
    value: str | None = None
    for part in parts:
        if part.startswith("-"):
            if option:
                yield option, value
            # --a=b and -ab have both parts in one.
            name, equals, rest = part.partition("=") if part.startswith("--") else (part[:2], "", part[2:])
            option, value = name, rest if equals else rest.removeprefix("=") or None
        elif value is None:
            value = part
        else:
            raise ConfigError(
                f"{_WHERE} {text!r}: {part!r} belongs to no option; quote a value with blanks, or give two options"
            )
    if option:
        yield option, value


def merge_options(
    ours: list[Directive],
    extra: list[Directive],
    skipped: tuple[str, ...],
    key: Callable[[str], set[str]],
    refused: Mapping[str, str],
    forbidden: Mapping[str, str],
) -> list[Directive]:
    """Return hpcgpu's options that the user neither skips nor gives, then the user's, in their order.

    ``refused``: options that the user may not give, each with its alternative. ``forbidden``: options that the site
    refuses, from anybody, each with its rule. ``key`` returns an option's long names: options are compared by name. As
    parts of a text, ``job_directives_skip=["-n"]`` drops a partition whose name contains it (dask-jobqueue 0.9).
    """
    for directive in extra:
        if instead := refused.get(directive.key):
            raise ConfigError(f"{opt('job_extra_directives', None)}: {directive.text!r} is not for this: {instead}")
    dropped = {name for text in skipped for name in key(text)} | {d.key for d in extra}
    kept = [d for d in ours if d.key not in dropped and d.key.partition(" ")[0] not in dropped] + extra
    for directive in kept:
        if rule := forbidden.get(directive.key):
            raise ConfigError(f"{directive.text!r} is in the job's script, but {rule}")
    return kept


def _refuse_control(value: str, what: str) -> None:
    """Raise ConfigError if the value has a line break or another control character."""
    if match := _CONTROL.search(value):
        raise ConfigError(f"{what}: {value!r} has the character {match[0]!r}, which no line of a script can carry")
