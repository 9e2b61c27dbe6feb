"""What is known as long as something else refers to it."""

from __future__ import annotations

from functools import partial
from typing import Generic, TypeVar
from weakref import ref

K = TypeVar("K")
V = TypeVar("V")


class WeakTable(Generic[K, V]):
    """A WeakValueDictionary of two methods, in half of the time: the store enters every value.

    A reference that is replaced dies with what it would have removed: none takes away its successor.
    """

    __slots__ = ("_forget", "_refs")

    def __init__(self) -> None:
        self._refs: dict[K, ref[V]] = {}
        self._forget = self._refs.pop

    def get(self, key: K) -> V | None:
        """Return what is known under a key."""
        found = self._refs.get(key)
        return None if found is None else found()

    def __setitem__(self, key: K, value: V) -> None:
        # called with the dead reference, which pop takes for its default
        self._refs[key] = ref(value, partial(self._forget, key))
