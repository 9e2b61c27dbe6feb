"""Every error that hpcgpu raises on purpose: one line for the person, the evidence attached."""

from __future__ import annotations

import sys

from hpcgpu.light_typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, ClassVar

DOCTOR = (
    "'hpcgpu doctor' looks for the cause on this machine; on a batch system 'hpcgpu doctor --submit', with the same "
    "options, also on two nodes"
)
ALL_FRAMES = "(all frames: import traceback; traceback.print_last())"
_MARK = "\ufdd0"  # around what a door writes in a form of its own; no text has this noncharacter of Unicode


class HpcGpuError(Exception):
    """Base of all errors of this package.

    Attributes
    ----------
    parts : tuple of str
        The message: every second part is an option, or a place where one was set, by ``opt``. Each door writes
        these in its own ``form``, and nothing else: texts of other programs stand as they are.
    evidence : str
        What another program said, byte for byte; empty when there was none.
    for_doctor : bool
        Whether the doctor can look for the cause. The last line that people read says so then. It is a note (PEP 678),
        which tracebacks show and ``str()`` does not: the message may become a part of another one.

    """

    for_doctor: ClassVar[bool] = False
    # how this process writes options: as keywords of Python, or as they are typed at its command line
    form: ClassVar[Callable[[str], str]] = str

    def __init__(self, message: str, *, evidence: str = "") -> None:
        self.parts = tuple(message.split(_MARK))
        super().__init__(message := "".join(self.parts))
        self.evidence = evidence
        if self.for_doctor and DOCTOR not in message:  # it may be in the log of a rank
            self.add_note(DOCTOR)

    def __str__(self) -> str:
        return plain(marked(self))

    def _render_traceback_(self) -> list[str]:
        """Return what IPython and Jupyter show in place of the frames between the user's line and the slip in it."""
        import traceback

        package = __name__.partition(".")[0]
        called = [(frame.f_globals.get("__name__", ""), frame, n) for frame, n in traceback.walk_tb(self.__traceback__)]
        ours = next((i for i, (name, *_) in enumerate(called) if name.partition(".")[0] == package), len(called))
        # a cell's own name; a module of the user's has another
        users = [c for c in called[:ours] if c[0] == "__main__"][-1:] or called[:ours][-1:]
        where = [f"line {n}: {traceback.FrameSummary(f.f_code.co_filename, n, '').line}" for _, f, n in users]
        return [*where, f"{type(self).__name__}: {whole(self)}", *([ALL_FRAMES] if called else [])]


class ConfigError(HpcGpuError, ValueError):
    """A setting is wrong; the message says what was given, what is allowed and where it was set."""


class ParseError(HpcGpuError, ValueError):
    """Output of a tool, or a file, was not understood; ``evidence`` holds it."""


class SubmitError(HpcGpuError):
    """The batch system refused a request, in its own words.

    Attributes
    ----------
    transient : bool
        True when the same request may succeed later.
    over_limit : bool
        True when it is for more jobs than this user may have: fewer may be accepted.
    unsure : bool
        True when the request may have been accepted all the same, and only its answer was lost.
    over_size : bool
        True when it is for a larger array than the queue takes: smaller ones may be accepted.

    """

    for_doctor = True

    def __init__(
        self,
        message: str,
        *,
        evidence: str = "",
        transient: bool = False,
        over_limit: bool = False,
        unsure: bool = False,
        over_size: bool = False,
    ) -> None:
        super().__init__(message, evidence=evidence)
        self.transient, self.over_limit, self.unsure, self.over_size = transient, over_limit, unsure, over_size


class JobError(HpcGpuError):
    """A job ended, or cannot be reached; the message carries its state, reason and the log's tail."""

    for_doctor = True


class ClosedError(JobError):
    """A :class:`JobError` about an object that its user has closed."""

    for_doctor = False


class LaunchError(HpcGpuError):
    """The ranks do not form the world that the launcher promised, or no launcher was found."""

    for_doctor = True


class WorldError(LaunchError):
    """A :class:`LaunchError` that every rank finds alike: only rank 0 says it."""


class TrustError(LaunchError):
    """The certificates of two processes do not belong together, or have expired; another way changes nothing."""


class BindingError(HpcGpuError):
    """A process does not have the binding that was planned for it."""


class SpillError(HpcGpuError):
    """A tier cannot take or give back an object; the message names the key and the tier."""


class CheckpointError(HpcGpuError):
    """A checkpoint cannot be opened, read or written; the message names the file or the name, and what to do."""


def end_script(*raised: Any) -> None:
    """Print what a notebook shows, if an error of ours ends a script; an excepthook."""
    if isinstance(error := raised[1], HpcGpuError):
        lines = "\n".join(error._render_traceback_()[:-1])
        print(f"{sys.argv[0]}, {lines}\n(all frames: HPCGPU_DEBUG=1)", file=sys.stderr)
    else:
        sys.__excepthook__(*raised)


def opt(option: str, value: object = object, where: str = "") -> str:
    """Return an option for a message: ``memory='5GB'``, ``memory=`` if any value is meant, ``memory`` for None."""
    text = "" if value is object else "..." if value is ... else repr(value)
    text = option if value is None else f"{option}={text}"
    return f"{_MARK}{text}{_MARK}{f' (set by {opt(where, None)})' if where else ''}"


def plain(text: str, form: Callable[[str], str] | None = None) -> str:
    """Return a text with its options in a form; None: in that of this process."""
    form = form or HpcGpuError.form
    return "".join(form(part) if i % 2 else part for i, part in enumerate(text.split(_MARK)))


def marked(error: HpcGpuError) -> str:
    """Return an error's text as a part of another error's: with its options."""
    return _MARK.join(error.parts)


def whole(error: BaseException, form: Callable[[str], str] | None = None) -> str:
    """Return an error's text, its options as in :func:`plain`, with its notes below, as people are to read it."""
    text = plain(marked(error), form) if isinstance(error, HpcGpuError) else str(error)
    return "\n".join([text, *getattr(error, "__notes__", ())])


def cause_of(error: BaseException) -> BaseException:
    """Return what an error says in truth: the first of ours behind it, else the innermost that has a text."""
    cause = error
    # distributed raises its own, "Worker failed to start.", from what has happened. A TimeoutError has no text.
    while error.__cause__ is not None and not isinstance(error, HpcGpuError):
        error = error.__cause__
        cause = error if message_of(error) != type(error).__name__ else cause
    return cause


def chain_of(error: BaseException) -> list[BaseException]:
    """Return an error and all errors that led to it, each once."""
    seen: dict[int, BaseException] = {}
    rest: list[BaseException | None] = [error]
    while rest:
        if (each := rest.pop()) is not None and id(each) not in seen:
            seen[id(each)] = each
            rest += [each.__context__, each.__cause__]
    return list(seen.values())


def message_of(error: BaseException) -> str:
    """Return what an error says, or its kind: it may have no text, or the code of others that makes it may raise."""
    try:
        return str(error) or type(error).__name__
    except Exception:
        return type(error).__name__
