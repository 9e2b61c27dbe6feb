"""Render the options of a PBS job script: hpcgpu's, with the values that each can carry, and the user's."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from hpcgpu.batch.script import Directive, merge, options_in, refuse_control
from hpcgpu.errors import ConfigError
from hpcgpu.model import JobSpec

# How many of the mark's 16 hexadecimal digits a name has; qstat shows 16 characters of a name.
_MARK = 8
_REFUSED = MappingProxyType(
    {
        "-J": "how many jobs there are is said by nodes=, or by scale() with shape='elastic'",
        "-I": "an interactive job has no script; in one, hpcgpu launch starts the ranks",
        "-W block": "qsub would answer when the job has ended, and is ended after a minute",
        "-z": "qsub would not say the job's id",
    }
)
# Characters that qsub takes and that no tool of PBS misreads: tried one by one (23.06.06). A colon is refused in a
# name, and the part after the @ of a queue is a server.
_ACCOUNT = (re.compile(r"[\w.:/+=@%~^\[\]-]+"), "letters, digits and . : / + = @ % ~ ^ - _")
_CARRIES: Mapping[str, tuple[re.Pattern[str], str]] = MappingProxyType(
    {
        "-N": (re.compile(r"[\w.+-]+", re.ASCII), "ASCII letters, digits and . + - _"),
        "-q": (re.compile(r"[\w.@:-]+", re.ASCII), "ASCII letters, digits and . @ : - _"),
        **dict.fromkeys(("-A", "-P"), _ACCOUNT),
        "-o": (re.compile(r"[\w./+=@%~^\[\]-]+", re.ASCII), "ASCII letters, digits and . / + = @ % ~ ^ - _"),
    }
)
_SETTINGS = MappingProxyType({"-N": "job_name", "-q": "queue", "-A": "account", "-P": "account", "-o": "log_directory"})
_LONGEST_NAME = 230


def render(
    ours: list[tuple[str, str | None]], spec: JobSpec, forbidden: Mapping[str, str] = MappingProxyType({})
) -> list[str]:
    """Return the lines below ``#!``: hpcgpu's options that have a value, then the user's, which replace them."""
    options = [Directive(k, f"{k}{'=' if ' ' in k else ' '}{_plain(k, v)}") for k, v in ours if v]
    extra = [d for text in spec.extra_directives for d in _extra(text)]
    return [f"#PBS {d.text}" for d in merge(options, extra, spec.skipped_directives, keys, _REFUSED, forbidden)]


def keys(text: str) -> set[str]:
    """Return the names of a user's options: ``-l select``, ``-q``."""
    return {directive.key for directive in _extra(text)}


def marked(name: str, mark: str) -> str:
    """Return a job's name with part of the mark: PBS cannot select jobs by anything else that hpcgpu sets."""
    return f"{name}-{mark[-_MARK:]}" if mark else name


def _plain(option: str, value: str) -> str:
    refuse_control(value, f"PBS option {option}")
    if option not in _CARRIES:
        return value
    pattern, allowed = _CARRIES[option]
    if not pattern.fullmatch(value):
        raise ConfigError(f"{_SETTINGS[option]}: PBS option {option} cannot carry {value!r}; allowed: {allowed}")
    if option == "-N" and len(value) > _LONGEST_NAME:
        raise ConfigError(f"job_name: {value[:20]!r}... makes a name of {len(value)} characters; allowed: 230")
    return value


def _extra(text: str) -> Iterator[Directive]:
    """Yield the user's options, each resource of ``-l`` and ``-W`` separately: a script may have several."""
    for option, value in options_in(text):
        if value is None:
            yield Directive(option, option)
        elif option in ("-l", "-W"):
            # walltime=1:00:00,place=free; a comma is also inside values, as in afterok:1,after:2.
            for part in re.split(r",(?=\w+=)", value):
                yield Directive(f"{option} {part.partition('=')[0]}", f"{option} {_quoted(part)}")
        else:
            yield Directive(option, f"{option} {_quoted(value)}")


def _quoted(value: str) -> str:
    return f'"{value}"' if re.search(r"\s", value) else value
