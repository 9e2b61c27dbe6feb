"""Proxies of objects in values, which come up when they are touched.

Here is the stand-in that wrapt holds for a proxy while its object is not up, its source, and operations that write to
it.

A proxy has its placeholder from the beginning: wrapt's own way to load late (``__wrapped_factory__``, 2.5.2) cannot be
undone, since ``del proxy.__wrapped__`` is an error. During an operation wrapt keeps a reference of its own to the held
object, so an eviction meanwhile does not take the object away from the operation.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np
import wrapt

from hpcgpu.errors import SpillError

BASE: Any = wrapt.BaseObjectProxy
# the C slot itself; a proxy's __wrapped__ is never a placeholder
HELD: Any = BASE.__wrapped__


class Source(Protocol):
    """The source of a proxy's object, with its class and bytes.

    Thread-safe: proxies call it in the threads that use them, in several at once. To load may take as long as a copy.
    """

    @property
    def kind(self) -> type: ...  # noqa: D102
    @property
    def nbytes(self) -> int: ...  # noqa: D102

    def length(self) -> int | None:
        """Return the object's ``len``; None if only the object has it."""

    def up(self) -> Any:
        """Bring the object up and return it; waits in the calling thread. Several threads may share a load."""

    def using(self) -> AbstractContextManager[Any]:
        """Bring the object up, return it, and keep it up while inside."""

    def dirty(self) -> None:
        """Record that the object was written to, so that copies of it do not count."""


def defines(kind: type, name: str) -> bool:
    """Tell whether the objects of a class have a special method; like Python, look in the class and its bases."""
    return any(name in base.__dict__ for base in kind.__mro__)


class State:
    """The state of a proxy. Thread-safe: several threads may load, while the store releases the object."""

    __slots__ = ("proxy", "source", "token")

    def __init__(self, source: Source) -> None:
        self.source = source
        self.token = object()  # a new one after each release
        self.proxy: Callable[[], Any] = lambda: None  # a weak reference, once the proxy is made

    def load(self) -> Any:
        """Bring the object up, and let the proxy hold it unless it was released meanwhile."""
        token = self.token
        value = up(self.source)
        proxy = self.proxy()
        if proxy is not None:
            HELD.__set__(proxy, value)
            # release changes the token first and then the slot: whichever thread is last, no stale object stays
            if self.token is not token:
                HELD.__set__(proxy, Placeholder(self))
        return value


class Placeholder:
    """The stand-in that wrapt holds while the object is not up: each touch loads the object, and is passed on to it."""

    __slots__ = ("_state",)

    def __init__(self, state: State) -> None:
        object.__setattr__(self, "_state", state)

    def __getattribute__(self, name: str) -> Any:
        state = _state_of(self)
        if name.startswith("__") and name.endswith("__"):
            kind = state.source.kind
            if name in ("__module__", "__doc__"):  # wrapt asks when a proxy is made (2.5.2, raw_init)
                return getattr(kind, name)
            if not defines(kind, name):  # so that is_dask_collection and the like load no object
                raise AttributeError(f"{kind.__name__!r} object has no attribute {name!r}")
        return getattr(state.load(), name)


_state_of: Callable[[Placeholder], State] = Placeholder.__dict__["_state"].__get__
# The special methods that wrapt calls on the held object; the proxy itself defines the operators.
_TOUCHES: dict[str, Callable[..., Any]] = {
    **{"iter": iter, "hash": hash, "str": str, "bool": bool, "int": int, "float": float, "dir": dir},
    **{"complex": complex, "bytes": bytes, "format": format, "reversed": reversed, "round": round},
    **{"trunc": math.trunc, "floor": math.floor, "ceil": math.ceil, "index": operator.index},
    **{"getitem": operator.getitem, "contains": operator.contains},
}


def _touch(operation: Callable[..., Any]) -> Callable[..., Any]:
    return lambda placeholder, *args: operation(_state_of(placeholder).load(), *args)


def _length(placeholder: Any) -> int:
    state = _state_of(placeholder)
    length = state.source.length()
    return len(state.load()) if length is None else length


for _name, _operation in _TOUCHES.items():
    setattr(Placeholder, f"__{_name}__", _touch(_operation))
Placeholder.__len__ = _length  # type: ignore[attr-defined]


def up(source: Source) -> Any:
    """Bring the object of a source up, and return it; raises as :func:`lifted`."""
    return lifted(source, source.up)


def lifted(source: Source, lift: Callable[[], Any]) -> Any:
    """Return the result of ``lift``; SpillError for all its errors but MemoryError."""
    try:
        return lift()
    except (MemoryError, SpillError):  # the next touch may find room
        raise
    except Exception as e:  # Python and numpy would take an AttributeError, TypeError or IndexError for an answer
        raise SpillError(f"a {source.kind.__module__}.{source.kind.__qualname__} cannot be brought up: {e!r}") from e


class Resident:
    """The source of an object that is up, and stays up. Thread-safe: it does not change."""

    def __init__(self, value: Any) -> None:
        self._value, self.kind = value, type(value)

    @property
    def nbytes(self) -> int:
        """Bytes of an array, else Python's ``getsizeof``."""
        nbytes = getattr(self._value, "nbytes", None)
        return nbytes if isinstance(nbytes, int) else sys.getsizeof(self._value)

    def length(self) -> int | None:
        """Return None: the object is up."""

    def up(self) -> Any:
        """Return the object."""
        return self._value

    def using(self) -> AbstractContextManager[Any]:
        """Return the object."""
        return nullcontext(self._value)

    def dirty(self) -> None:
        """Do nothing: there are no copies."""


# Methods that write to their object, of arrays, lists, dicts, sets and data frames.
METHODS = frozenset(
    """
    fill sort partition put itemset resize byteswap setfield setflags
    append extend insert pop remove reverse clear update setdefault popitem add discard
    difference_update intersection_update symmetric_difference_update
    """.split()  # a list of so many quoted words is not easier to read
)
# Methods of data frames that write with inplace=True.
INPLACE_METHODS = frozenset(
    """
    drop dropna fillna ffill bfill replace rename rename_axis reset_index set_index sort_values sort_index
    drop_duplicates query eval clip interpolate mask where
    """.split()
)
# Attributes through which code writes to the object.
INDEXERS = frozenset({"loc", "iloc", "at", "iat", "__cuda_array_interface__", "__dlpack__"})
# Functions of numpy that write to their first argument.
_FILLS = {np.copyto, np.put, np.place, np.putmask, np.fill_diagonal, np.put_along_axis}


def written_arguments(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the arguments that a numpy function writes to."""
    first = function in _FILLS or getattr(function, "__name__", "") == "at"  # np.add.at
    if first or kwargs.get("copy") is False or kwargs.get("overwrite_input"):
        return args[:1], kwargs
    return kwargs.get("out")
