"""Opens objects in the search for device arrays, and makes them again from their contents.

No code of the object's class runs, neither to open an object nor to make one: contents are read and set as by Python
itself. An object stays closed if it has more than these contents, or if a copy cannot replace it.
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
    """Stands for a slot without a value, for attributes of an object that has none, and for an object not made yet."""

    def __reduce__(self) -> str:
        return "UNSET"  # pickle takes it for the name of a global


UNSET = _Unset()
# Most objects in containers are of these types, and hold no other objects.
SIMPLE: frozenset[type] = frozenset(
    {int, str, float, bool, bytes, complex, type(None), np.float64, np.float32, np.int64, np.int32, np.bool_, _Unset}
)
_HEAP_TYPE, _MANAGED_DICT, _POINTER_BYTES = 1 << 9, 1 << 4, 8  # Include/object.h, CPython 3.11 to 3.14
# Roots of modules whose objects are bound to their process, thread or moment. An object that holds one directly is not
# mere data, and stays closed: behind it may be a whole worker.
_LIVE_ROOTS = frozenset(
    """
    _thread threading _io io socket _socket ssl _ssl select selectors subprocess multiprocessing concurrent asyncio
    _asyncio queue _queue contextvars _contextvars ctypes _ctypes mmap sqlite3 tornado distributed
    """.split()  # a list of so many quoted words is not easier to read
)
_LIVE_KINDS = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType, types.FrameType, types.TracebackType)
# Tables have parts of their own, which their libraries move; and objects of hpcgpu hold no values of users.
_CLOSED_ROOTS = _LIVE_ROOTS | {"pandas", "pyarrow", "cudf", "hpcgpu", "weakref"}
_OWN_PICKLE = (Counter,)  # and the classes of _BASES


class Base(NamedTuple):
    """Reads and makes objects of one of Python's own classes; any thread may call it."""

    items: Callable[[Any], list[Any]]  # returns a new list of an object's contents, except attributes
    new: Callable[[Any], Any] | None  # makes an empty object of a subclass; None if ``fill`` makes the object
    fill: Callable[[Any, list[Any]], Any]  # fills an empty object with items, or makes an object of a class from items
    keyed: Callable[[int], slice] = lambda _: slice(0)  # the items, of so many, that are hashed to fill an object


def _of_dict(x: dict[Any, Any]) -> list[Any]:
    return [*dict.keys(x), *dict.values(x)]


def _fill_dict(x: Any, items: list[Any]) -> None:
    dict.update(x, zip(items[: len(items) // 2], items[len(items) // 2 :], strict=True))


def _fill_ordered(x: Any, items: list[Any]) -> None:
    for key, value in zip(items[: len(items) // 2], items[len(items) // 2 :], strict=True):
        OrderedDict.__setitem__(x, key, value)


_FACTORY: Any = defaultdict.__dict__["default_factory"]
_MAXLEN: Any = deque.__dict__["maxlen"]


def _fill_default(x: Any, items: list[Any]) -> None:
    _FACTORY.__set__(x, items[0])
    _fill_dict(x, items[1:])


def _keys(n: int) -> slice:
    return slice(n // 2)


def _all(_: int) -> slice:
    return slice(None)


class BoundMethod:
    """Stands for ``types.MethodType`` in pickles, since pickle finds classes by name."""


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
    types.SimpleNamespace: Base(
        lambda x: _of_dict(x.__dict__),
        types.SimpleNamespace.__new__,
        lambda x, items: _fill_dict(x.__dict__, items),
        _keys,
    ),
    types.MethodType: Base(lambda x: [x.__func__, x.__self__], None, lambda kind, items: kind(*items)),
    functools.partial: Base(
        lambda x: [x.func, x.args, x.keywords],
        lambda kind: functools.partial.__new__(kind, _keys),  # any function, until it is filled
        lambda x, items: functools.partial.__setstate__(x, (*items, None)),  # type: ignore[attr-defined]
    ),
}


class Container:
    """Opens the objects of a class, and makes them again. Immutable: any thread may call it, without the store's lock.

    ``is_data``: it is one of Python's containers, a subclass of one, a dataclass or a class of attrs: users access its
    contents directly. The contents of other classes are accessed by methods.
    """

    __slots__ = ("_base", "_dict", "_kind", "_slots", "attributes", "is_data", "kind")

    def __init__(self, kind: type, base: type, attributes: Any, slots: tuple[Any, ...]) -> None:
        self._kind, self._base, self._dict, self._slots = kind, _BASES[base], attributes, slots
        self.attributes = (attributes is not None) + len(slots)  # how many of the parts, the last ones, are attributes
        self.kind = BoundMethod if kind is types.MethodType else kind  # for container_of; it can be pickled
        is_record = hasattr(kind, "__dataclass_fields__") or hasattr(kind, "__attrs_attrs__")
        self.is_data = is_record or base is not object

    def parts(self, x: Any) -> list[Any] | None:
        """Return an object's contents, its attributes last; None if it must stay closed."""
        parts = self._base.items(x)
        if not self.attributes:
            return parts
        if self._dict is not None:
            attributes = self._dict.__get__(x)
            if attributes and _holds_live(dict.values(attributes)):
                return None
            parts.append(attributes or UNSET)
        for slot in self._slots:
            try:
                parts.append(slot.__get__(x))
            except AttributeError:
                parts.append(UNSET)
        return None if self._slots and _holds_live(parts[-len(self._slots) :]) else parts

    def attributes_of(self, x: Any) -> dict[str, Any] | None:
        """Return an object's ``__dict__``, if it has attributes other than slots."""
        return (self._dict.__get__(x) or None) if self._dict is not None else None

    def new(self) -> Any:
        """Return an empty object; UNSET if it can only be made from its contents."""
        return UNSET if self._base.new is None else self._base.new(self._kind)

    def filled(self, x: Any, parts: list[Any]) -> Any:
        """Fill an object that :meth:`new` made with parts; return it."""
        items = parts[: len(parts) - self.attributes] if self.attributes else parts
        if x is UNSET:
            x = self._base.fill(self._kind, items)
        else:
            self._base.fill(x, items)
        if self.attributes:
            values = iter(parts[len(items) :])
            if self._dict is not None and (attributes := next(values)) is not UNSET:
                self._dict.__set__(x, attributes)
            for slot, value in zip(self._slots, values, strict=True):
                if value is not UNSET:
                    slot.__set__(x, value)
        return x

    def hashed(self, parts: Any) -> Any:
        """Return the parts that are hashed when an object is filled."""
        return parts[self._base.keyed(len(parts) - self.attributes)]


@functools.lru_cache(1024)
def container_of(kind: type) -> Container | None:
    """Return the container of a class; None if its objects hold no others, or stay closed."""
    kind = types.MethodType if kind is BoundMethod else kind
    layouts = [b for b in kind.__mro__ if b in _BASES or not b.__flags__ & _HEAP_TYPE]
    if any(b not in _BASES for b in layouts) or _is_closed(kind):  # a class written in C, or a closed one
        return None
    base = layouts[0]  # the nearest: for an OrderedDict itself, not dict
    python_bases = [b for b in kind.__mro__ if b not in _BASES]
    slots = tuple(d for b in python_bases for d in b.__dict__.values() if type(d) is types.MemberDescriptorType)
    attributes = next((b.__dict__["__dict__"] for b in kind.__mro__ if "__dict__" in b.__dict__), None)
    if base is types.SimpleNamespace:
        attributes = None  # they are its items
    if attributes is not None and type(attributes) is not types.GetSetDescriptorType:
        return None  # a property called __dict__
    if not _is_all_python(kind, base, len(slots)) or (slots and _BASES[base].new is None):
        return None
    return Container(kind, base, attributes, slots)


def _is_all_python(kind: type, base: type, slots: int) -> bool:
    """Tell whether its objects have no memory but attributes and slots, as Python checks it to copy them."""
    # object_getstate_default, Objects/typeobject.c of CPython 3.11
    pointers = slots
    if kind.__dictoffset__ and not base.__dictoffset__:
        pointers += not kind.__flags__ & _MANAGED_DICT
    if kind.__weakrefoffset__ > 0 and not base.__weakrefoffset__:
        pointers += 1
    return kind.__basicsize__ <= base.__basicsize__ + _POINTER_BYTES * pointers


def _is_closed(kind: type) -> bool:
    """Tell whether a copy of an object of a class cannot replace the object."""
    if kind.__module__.partition(".")[0] in _CLOSED_ROOTS or kind in copyreg.dispatch_table:
        return True
    if hasattr(kind, "__hpcgpu_device__") or hasattr(kind, "__cuda_array_interface__"):
        return True  # a device array is not a container
    for name in ("__reduce__", "__reduce_ex__"):  # not made of their contents: enums, singletons, lazy collections
        definer = next(b for b in kind.__mro__ if name in b.__dict__)
        if definer not in _BASES and definer not in _OWN_PICKLE:
            return True
    # the object and its copy would both free the same resource
    return any("__del__" in b.__dict__ for b in kind.__mro__)


def _holds_live(held: Iterable[Any]) -> bool:
    return not SIMPLE.issuperset(map(type, held)) and any(map(_is_live, {*map(type, held)} - SIMPLE))


@functools.lru_cache(1024)
def _is_live(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _LIVE_ROOTS or issubclass(kind, _LIVE_KINDS)
