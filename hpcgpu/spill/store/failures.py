"""Errors that several readers get: each gets its own, and what is kept has no frames, whose arrays would stay."""

from __future__ import annotations

import copy

from hpcgpu.errors import SpillError


def forget_frames(error: BaseException) -> None:
    """Take the tracebacks from an error, and from those that led to it."""
    seen: dict[int, None] = {}
    rest: list[BaseException | None] = [error]
    while rest:
        if (each := rest.pop()) is not None and id(each) not in seen:
            seen[id(each)] = None
            each.__traceback__ = None
            rest += [each.__cause__, each.__context__]


def own_error(error: Exception) -> Exception:
    """Return an error to raise in place of one that others get, too: to raise it puts the frames of its thread in it.

    It is of the same class, unless the class makes no equal one: then it is a SpillError.
    """
    try:
        made = copy.copy(error)
        is_equal = type(made) is type(error) and made is not error and str(made) == str(error)
    except Exception:  # classes of users
        is_equal = False
    if not is_equal:
        made = SpillError(f"a value cannot be read now: {error!r}")
        made.__cause__ = error
    elif error.__cause__ is not None:  # to set None would hide what the reader is in the middle of
        made.__cause__ = error.__cause__
    return made
