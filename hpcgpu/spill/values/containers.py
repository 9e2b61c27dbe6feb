"""Which objects are opened in the search for device arrays, what each holds, and how one like it is made.

No code of the object's class runs, neither to open nor to make one: what it holds is read and set as Python itself
does. An object is left closed where that is not all of it, or where two of it would not be one and the same.
"""

from __future__ import annotations

import copyreg
import functools
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np


class _Unset:
    """Stands for a slot without a value, for attributes of which there are none, and for what is not made yet."""

    def __reduce__(self) -> str:
        return "UNSET"  # pickle's way to say: the one that is there


UNSET = _Unset()
# Objects of these hold nothing; most of what is in containers is one of them.
SIMPLE: frozenset[type] = frozenset(
    {int, str, float, bool, bytes, complex, type(None), np.float64, np.float32, np.int64, np.int32, np.bool_, _Unset}
)
_HEAP_TYPE, _MANAGED_DICT, _POINTER_BYTES = 1 << 9, 1 << 4, 8  # Include/object.h, CPython 3.11 to 3.14
# What is bound to its process, thread or moment. Who holds one directly is no mere data, and stays closed: behind it
# may be a whole worker.
_LIVE_ROOTS = frozenset(
    """
    _thread threading _io io socket _socket ssl _ssl select selectors subprocess multiprocessing concurrent asyncio
    _asyncio queue _queue contextvars _contextvars ctypes _ctypes mmap sqlite3 tornado distributed
    """.split()  # noqa: SIM905 - a list of so many quoted words is not easier to read
)
_LIVE_KINDS = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType, types.FrameType, types.TracebackType)
# Tables have parts of their own, which move by their libraries; and what is ours holds no values of users.
_CLOSED_ROOTS = _LIVE_ROOTS | {"pandas", "pyarrow", "cudf", "hpcgpu", "weakref"}
_OWN_PICKLE = (Counter,)  # and those of _BASES


class Base(NamedTuple):
    """What a class of Python's own holds, and how one is made of that.

    Immutable; this module makes them once, and Container calls them in any thread.

    Attributes
    ----------
    items : callable
        Returns a new list of all that an object holds, but attributes.
    new : callable or None
        Makes an empty object of a subclass; None where an object is made with all that it holds, by ``fill``.
    fill : callable
        Fills an empty object with items; or, given a class, makes one of them.
    keyed : callable
        Of a number of items returns which are hashed when an object is filled.

    """

    items: Callable[[Any], list[Any]]
    new: Callable[[Any], Any] | None
    fill: Callable[[Any, list[Any]], Any]
    keyed: Callable[[int], slice] = lambda _: slice(0)


def _of_dict(x: dict[Any, Any]) -> list[Any]:
    return [*dict.keys(x), *dict.values(x)]


def _fill_dict(x: Any, items: list[Any]) -> None:  # noqa: ANN401
    dict.update(x, zip(items[: len(items) // 2], items[len(items) // 2 :], strict=True))


def _fill_ordered(x: Any, items: list[Any]) -> None:  # noqa: ANN401
    for key, value in zip(items[: len(items) // 2], items[len(items) // 2 :], strict=True):
        OrderedDict.__setitem__(x, key, value)


_FACTORY: Any = defaultdict.__dict__["default_factory"]
_MAXLEN: Any = deque.__dict__["maxlen"]


def _fill_default(x: Any, items: list[Any]) -> None:  # noqa: ANN401
    _FACTORY.__set__(x, items[0])
    _fill_dict(x, items[1:])


def _fill_namespace(x: Any, items: list[Any]) -> None:  # noqa: ANN401
    _fill_dict(x.__dict__, items)


def _new_partial(kind: Any) -> Any:  # noqa: ANN401
    return functools.partial.__new__(kind, _nothing)


def _nothing() -> None:
    """Stand in for the function of a partial that is still being made."""


def _keys(n: int) -> slice:
    return slice(n // 2)


def _all(_: int) -> slice:
    return slice(None)


class BoundMethod:
    """Stands for ``types.MethodType`` where classes are pickled, which pickle does by names. Nobody makes one."""


_BASES: dict[type, Base] = {
    object: Base(lambda _: [], object.__new__, lambda *_: None),
    list: Base(list.copy, list.__new__, list.extend),
    tuple: Base(lambda x: [*tuple.__iter__(x)], None, tuple.__new__),
    dict: Base(_of_dict, dict.__new__, _fill_dict, _keys),
    OrderedDict: Base(
        lambda x: [*OrderedDict.keys(x), *OrderedDict.values(x)], OrderedDict.__new__, _fill_ordered, _keys
    ),
    defaultdict: Base(
        lambda x: [_FACTORY.__get__(x), *_of_dict(x)],
        defaultdict.__new__,
        _fill_default,
        lambda n: slice(1, 1 + n // 2),
    ),
    set: Base(lambda x: [*set.__iter__(x)], set.__new__, set.update, _all),
    frozenset: Base(lambda x: [*frozenset.__iter__(x)], None, frozenset.__new__, _all),
    deque: Base(
        lambda x: [_MAXLEN.__get__(x), *deque.__iter__(x)],
        deque.__new__,
        lambda x, items: deque.__init__(x, items[1:], items[0]),
    ),
    types.SimpleNamespace: Base(lambda x: _of_dict(x.__dict__), types.SimpleNamespace.__new__, _fill_namespace, _keys),
    types.MethodType: Base(lambda x: [x.__func__, x.__self__], None, lambda kind, items: kind(*items)),
    functools.partial: Base(
        lambda x: [x.func, x.args, x.keywords],
        _new_partial,
        lambda x, items: functools.partial.__setstate__(x, (*items, None)),  # type: ignore[attr-defined]
    ),
}


class Container:
    """How the objects of a class are opened, and made again.

    Immutable, so that any thread may call it; :func:`container_of` makes it. What takes values apart and puts them
    together calls it, without the store's lock.

    Attributes
    ----------
    kind : type
        For :func:`container_of`; it can be pickled.
    is_data : bool
        Whether it is a container of Python's own, a subclass of one, a dataclass or of attrs: who uses one looks at
        what it holds. The methods of other classes do.
    attributes : int
        How many of an object's parts are attributes: the last ones.

    """

    __slots__ = ("_attributes", "_base", "_dict", "_kind", "_slots", "attributes", "is_data", "kind")

    def __init__(self, kind: type, base: type, attributes: Any, slots: tuple[Any, ...]) -> None:  # noqa: ANN401
        self._kind, self._base, self._dict, self._slots = kind, _BASES[base], attributes, slots
        self.attributes = (attributes is not None) + len(slots)
        self.kind = BoundMethod if kind is types.MethodType else kind
        own = hasattr(kind, "__dataclass_fields__") or hasattr(kind, "__attrs_attrs__")
        self.is_data = own or base is not object

    def parts(self, x: Any) -> list[Any] | None:  # noqa: ANN401
        """Return what an object holds, its attributes last; None for one that is to stay closed."""
        parts = self._base.items(x)
        if not self.attributes:
            return parts
        if self._dict is not None:
            there = self._dict.__get__(x)
            if there and _holds_live(dict.values(there)):
                return None
            parts.append(there or UNSET)
        for slot in self._slots:
            try:
                parts.append(slot.__get__(x))
            except AttributeError:
                parts.append(UNSET)
        return None if self._slots and _holds_live(parts[-len(self._slots) :]) else parts

    def attributes_of(self, x: Any) -> dict[str, Any] | None:  # noqa: ANN401
        """Return where an object's attributes are, if there are any but slots."""
        return (self._dict.__get__(x) or None) if self._dict is not None else None

    def new(self) -> Any:  # noqa: ANN401
        """Return an empty object; UNSET where it can be made only of what it holds."""
        return UNSET if self._base.new is None else self._base.new(self._kind)

    def filled(self, x: Any, parts: list[Any]) -> Any:  # noqa: ANN401
        """Return an object that :meth:`new` made, filled with parts."""
        items = parts[: len(parts) - self.attributes] if self.attributes else parts
        if x is UNSET:
            x = self._base.fill(self._kind, items)
        else:
            self._base.fill(x, items)
        if self.attributes:
            given = iter(parts[len(items) :])
            if self._dict is not None and (there := next(given)) is not UNSET:
                self._dict.__set__(x, there)
            for slot, value in zip(self._slots, given, strict=True):
                if value is not UNSET:
                    slot.__set__(x, value)
        return x

    def hashed(self, parts: Any) -> Any:  # noqa: ANN401
        """Return those parts that are hashed when an object is filled."""
        return parts[self._base.keyed(len(parts) - self.attributes)]


@functools.lru_cache(1024)
def container_of(kind: type) -> Container | None:
    """Return how objects of a class are opened; None for those that hold nothing, or stay closed."""
    kind = types.MethodType if kind is BoundMethod else kind
    base = _base_of(kind)
    if base is None or _is_closed(kind):
        return None
    own = [b for b in kind.__mro__ if b not in _BASES]
    slots = tuple(d for b in own for d in b.__dict__.values() if type(d) is types.MemberDescriptorType)
    attributes = next((b.__dict__["__dict__"] for b in kind.__mro__ if "__dict__" in b.__dict__), None)
    if base is types.SimpleNamespace:
        attributes = None  # they are what it holds
    if attributes is not None and type(attributes) is not types.GetSetDescriptorType:
        return None  # a property of that name
    if not _is_all_python(kind, base, len(slots)) or (slots and _BASES[base].new is None):
        return None
    return Container(kind, base, attributes, slots)


def _base_of(kind: type) -> type | None:
    """Return which class of Python's own the objects of a class are laid out as, if it is one that is opened."""
    known = [b for b in kind.__mro__ if b in _BASES or not b.__flags__ & _HEAP_TYPE]
    if any(b not in _BASES for b in known):
        return None  # of C code
    return known[0]  # the nearest: of an OrderedDict itself, not a dict


def _is_all_python(kind: type, base: type, slots: int) -> bool:
    """Tell whether its objects have no memory but attributes and slots, as Python tells it when it copies them.

    ``object_getstate_default``, Objects/typeobject.c of CPython 3.11.
    """
    pointers = slots
    if kind.__dictoffset__ and not base.__dictoffset__:
        pointers += not kind.__flags__ & _MANAGED_DICT
    if kind.__weakrefoffset__ > 0 and not base.__weakrefoffset__:
        pointers += 1
    return kind.__basicsize__ <= base.__basicsize__ + _POINTER_BYTES * pointers


def _is_closed(kind: type) -> bool:
    """Tell a class of whose objects one is not as good as another."""
    if kind.__module__.partition(".")[0] in _CLOSED_ROOTS or kind in copyreg.dispatch_table:
        return True
    if hasattr(kind, "__hpcgpu_device__") or hasattr(kind, "__cuda_array_interface__"):
        return True  # a device array is nobody's container
    for name in ("__reduce__", "__reduce_ex__"):  # not built by what they hold: enums, singletons, lazy collections
        definer = next(b for b in kind.__mro__ if name in b.__dict__)
        if definer not in _BASES and definer not in _OWN_PICKLE:
            return True
    # two would end what both use
    return any("__del__" in b.__dict__ for b in kind.__mro__)


def _holds_live(held: Iterable[Any]) -> bool:
    return not SIMPLE.issuperset(map(type, held)) and any(map(_is_live, {*map(type, held)} - SIMPLE))


@functools.lru_cache(1024)
def _is_live(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _LIVE_ROOTS or issubclass(kind, _LIVE_KINDS)
