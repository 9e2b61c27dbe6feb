"""What wrapt holds for a proxy while its object is not up, and where the object comes from.

A stub is there from the beginning: wrapt's own way to load late (``__wrapped_factory__``, 2.5.2) cannot be taken back,
``del proxy.__wrapped__`` is refused. wrapt takes a reference of its own to what it holds for as long as an operation
takes, so that an eviction meanwhile does not take the object away from it.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import wrapt

from hpcgpu.errors import SpillError

BASE: Any = wrapt.BaseObjectProxy
# the C slot itself: what a proxy shows as __wrapped__ is never a stub
HELD: Any = BASE.__wrapped__


class Source(Protocol):
    """Where the object of a proxy is.

    Thread-safe: proxies call it in the threads that use them, in several at once. Loading may take as long as a copy.

    Attributes
    ----------
    kind : type
        The object's class.
    nbytes : int
        Its bytes.

    """

    @property
    def kind(self) -> type: ...  # noqa: D102
    @property
    def nbytes(self) -> int: ...  # noqa: D102

    def length(self) -> int | None:
        """Return what ``len`` says of the object, as far as that is known without it."""

    def up(self) -> Any:  # noqa: ANN401
        """Bring the object up and return it, waiting in the calling thread; several may call, one load is enough."""

    def using(self) -> AbstractContextManager[Any]:
        """Return the object, brought up, and keep it where it is while inside."""

    def dirty(self) -> None:
        """Take note that the object was written to: copies of it are worth nothing."""


def defines(kind: type, name: str) -> bool:
    """Tell whether the objects of a class have a special method, as Python looks for it: in the class, not its own."""
    return any(name in base.__dict__ for base in kind.__mro__)


def _nothing() -> None:
    """Stand in for a reference to a proxy that is still being made."""


class State:
    """What a proxy knows; it is let go when the proxy is.

    Thread-safe: several threads may load at once, and the store may let the proxy go meanwhile.

    Attributes
    ----------
    source : Source
        Where the object is.
    token : object
        Another one each time that the proxy was let go.
    proxy : callable
        A weak reference.

    """

    __slots__ = ("proxy", "source", "token")

    def __init__(self, source: Source) -> None:
        self.source = source
        self.token = object()
        self.proxy: Callable[[], Any] = _nothing

    def load(self) -> Any:  # noqa: ANN401
        """Bring the object up, and let the proxy hold it unless it was let go meanwhile."""
        token = self.token
        found = up(self.source)
        proxy = self.proxy()
        if proxy is not None:
            HELD.__set__(proxy, found)
            # let_go changes the token first and the slot then: whichever comes last, a stale object does not stay
            if self.token is not token:
                HELD.__set__(proxy, proxy._self_stub)
        return found


class Stub:
    """What wrapt holds where the object is not up: it loads the object at each touch, and does it there.

    Thread-safe, as its state is; touched by wrapt alone.
    """

    __slots__ = ("_state",)

    def __init__(self, state: State) -> None:
        object.__setattr__(self, "_state", state)

    def __getattribute__(self, name: str) -> Any:  # noqa: ANN401
        state = _state_of(self)
        if name.startswith("__") and name.endswith("__"):
            kind = state.source.kind
            if name in ("__module__", "__doc__"):  # wrapt asks when a proxy is made (2.5.2, raw_init)
                return getattr(kind, name)
            if not defines(kind, name):  # is_dask_collection and its like load nothing so
                raise AttributeError(f"{kind.__name__!r} object has no attribute {name!r}")
        return getattr(state.load(), name)


_state_of: Callable[[Stub], State] = Stub.__dict__["_state"].__get__
# What the special methods of wrapt's proxy call of what it holds; operators are the proxy's own.
_TOUCHES: dict[str, Callable[..., Any]] = {
    **{"iter": iter, "hash": hash, "str": str, "bool": bool, "int": int, "float": float, "dir": dir},
    **{"complex": complex, "bytes": bytes, "format": format, "reversed": reversed, "round": round},
    **{"trunc": math.trunc, "floor": math.floor, "ceil": math.ceil, "index": operator.index},
    **{"getitem": operator.getitem, "contains": operator.contains},
}


def _touch(operation: Callable[..., Any]) -> Callable[..., Any]:
    return lambda stub, *args: operation(_state_of(stub).load(), *args)


for _name, _operation in _TOUCHES.items():
    setattr(Stub, f"__{_name}__", _touch(_operation))


def _length(stub: Any) -> int:  # noqa: ANN401
    state = _state_of(stub)
    known = state.source.length()
    return len(state.load()) if known is None else known


Stub.__len__ = _length  # type: ignore[attr-defined]


def up(source: Source) -> Any:  # noqa: ANN401
    """Return the object of a source, brought up; raises as :func:`lifted`."""
    return lifted(source, source.up)


def lifted(source: Source, lift: Callable[[], Any]) -> Any:  # noqa: ANN401
    """Return what ``lift`` returns.

    Raises
    ------
    MemoryError
        As it came: there may be room at the next touch.
    SpillError
        For every other error: of an AttributeError, a TypeError or an IndexError Python and numpy would make a wrong
        answer, such as that there is no such attribute.

    """
    try:
        return lift()
    except (MemoryError, SpillError):
        raise
    except Exception as e:
        raise SpillError(f"a {source.kind.__module__}.{source.kind.__qualname__} cannot be brought up: {e!r}") from e


class Here:
    """Source of an object that is up, and stays so. Thread-safe: nothing changes."""

    def __init__(self, value: Any) -> None:  # noqa: ANN401
        self._value, self.kind = value, type(value)

    @property
    def nbytes(self) -> int:
        """Bytes of an array, else what Python says."""
        nbytes = getattr(self._value, "nbytes", None)
        return nbytes if isinstance(nbytes, int) else sys.getsizeof(self._value)

    def length(self) -> int | None:
        """It is there: ask it."""

    def up(self) -> Any:  # noqa: ANN401
        """Return it."""
        return self._value

    def using(self) -> AbstractContextManager[Any]:
        """Return it."""
        return nullcontext(self._value)

    def dirty(self) -> None:
        """Do nothing: there are no copies."""
