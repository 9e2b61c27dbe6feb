"""What all job scripts have in common: options of the user read as options, and the body in bash."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hpcgpu.errors import ConfigError
from hpcgpu.model import JobSpec

_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class Directive:
    """One option of a script: what it is called (``--constraint``), and the text that stands in the script."""

    key: str
    text: str


def body(spec: JobSpec, before: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return the script below its options. The last command is the job's, and its exit code the script's."""
    first: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    if spec.exit_file:
        # A bash that dies of SIGTERM would leave 0 in the file (5.2), so it catches it: in the prologue to end
        # with 143, later to wait for the command, which has the signal too and an exit code of its own.
        record = f"echo $? > {shlex.quote(spec.exit_file)}"
        first = (f"trap {shlex.quote(record)} EXIT", "trap 'exit 143' TERM")
        last = ("trap : TERM",)
    env = (f"export {name}={shlex.quote(value)}" for name, value in spec.env)
    return (*before, *first, *spec.prologue, *env, *last, f"{shlex.join(spec.argv)} {spec.arguments}".rstrip(), "")


def options_in(text: str) -> Iterator[tuple[str, str | None]]:
    """Yield (option, value) for each option of the user's text: ``--a=b``, ``-a b``, ``-ab``, ``--flag``.

    Raises
    ------
    ConfigError
        Not options, or a value with a blank that is not quoted.

    """
    refuse_control(text, "job_extra_directives")
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"{text!r} is no option for the batch system: {error}") from error
    if not words or not words[0].startswith("-") or words[0] in ("-", "--"):
        raise ConfigError(f"{text!r} is no option for the batch system; allowed: '--constraint=a100', '-C a100'")
    option: str | None = None
    value: str | None = None
    for word in words:
        if word.startswith("-"):
            if option:
                yield option, value
            option, value = split_option(word)
        elif value is None:
            value = word
        else:
            raise ConfigError(
                f"{text!r}: {word!r} belongs to no option; quote a value with blanks, or give two options"
            )
    if option:
        yield option, value


def split_option(word: str) -> tuple[str, str | None]:
    """Return (``--a``, ``b``) of ``--a=b``, and (``-a``, ``b``) of ``-ab``."""
    if word.startswith("--"):
        name, equals, value = word.partition("=")
        return name, value if equals else None
    return word[:2], word[2:].removeprefix("=") or None


def merge(
    ours: list[Directive], extra: list[Directive], skipped: tuple[str, ...], key: Callable[[str], set[str]]
) -> list[Directive]:
    """Return ours without what is skipped or given by the user, then the user's, in their order.

    Options are compared as options (``key`` knows their short names), never as parts of a text:
    dask-jobqueue 0.9 with ``job_directives_skip=["-n"]`` lost the partition, for its name had "-n" in it.
    """
    gone = {found for text in skipped for found in key(text)} | {d.key for d in extra}
    return [d for d in ours if d.key not in gone and d.key.partition(" ")[0] not in gone] + extra


def refuse_control(value: str, what: str) -> str:
    """Return the value, or raise ConfigError if it has a line break or another control character."""
    if found := _CONTROL.search(value):
        raise ConfigError(f"{what}: {value!r} has the character {found[0]!r}, which no line of a script can carry")
    return value
