"""The content of the store: values of tasks, the units in them, and each tier's form of a unit.

Here objects are opened in the search for device arrays, and made again from their contents.

Contents are read and set as by Python itself: no code of the object's class runs. An object stays closed if it has more
than these contents, or if a copy cannot replace it; ``contents`` has the functions that open such objects all the same.
"""

from __future__ import annotations

import copyreg
import functools
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np


class _Unset:
    """Stands for a slot without a value, and for an object not made yet."""

    def __reduce__(self) -> str:
        return "UNSET"  # pickle takes it for the name of a global


UNSET = _Unset()
# Most objects in containers are of these types, and hold no other objects.
SIMPLE: frozenset[type] = frozenset(
    {int, str, float, bool, bytes, complex, type(None), np.float64, np.float32, np.int64, np.int32, np.bool_, _Unset}
)
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


@functools.singledispatch
def contents(x: Any) -> tuple[Callable[..., Any], Iterable[Any]] | None:
    """Return how the store takes the arrays out of an object, and makes it again.

    Register a function for a class of your own that the store does not open by itself: a compiled class, or one with a
    ``__reduce__`` or ``__del__``. Register it in the module of the class, so that every worker does. It holds for
    subclasses, too.

    Parameters
    ----------
    x : object
        An object of the class.

    Returns
    -------
    tuple or None
        A function of a module (or the class itself), and the arguments with which it makes the object again; they may
        hold arrays to any depth. With None the object stays as it is, and its arrays stay on the device.

    Examples
    --------
    >>> from hpcgpu.spill import contents
    >>> class Grid:
    ...     def __init__(self, cells, spacing):
    ...         self.cells, self.spacing = cells, spacing
    ...     def __reduce__(self):
    ...         return Grid, (self.cells, self.spacing)
    >>> @contents.register(Grid)
    ... def grid_contents(grid):
    ...     return Grid, (grid.cells, grid.spacing)
    """
    del x
    return None


_closed = contents.dispatch(object)


class Base(NamedTuple):
    """Reads and makes objects of one of Python's own classes; any thread may call it."""

    items: Callable[[Any], list[Any]]  # returns a new list of an object's contents, except attributes
    new: Callable[[Any], Any]  # makes an empty object of a subclass
    fill: Callable[[Any, list[Any]], Any]  # fills an empty object; of an immutable class makes one of a class and items
    immutable: bool = False


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


_NO_ITEMS: Callable[[Any], list[Any]] = lambda _: []  # noqa: E731 - as the others in the table
_BASES: dict[type, Base] = {
    object: Base(_NO_ITEMS, object.__new__, lambda *_: None),
    list: Base(list.copy, list.__new__, list.extend),
    tuple: Base(lambda x: [*tuple.__iter__(x)], tuple.__new__, tuple.__new__, immutable=True),
    dict: Base(_of_dict, dict.__new__, _fill_dict),
    OrderedDict: Base(lambda x: [*OrderedDict.keys(x), *OrderedDict.values(x)], OrderedDict.__new__, _fill_ordered),
    defaultdict: Base(lambda x: [_FACTORY.__get__(x), *_of_dict(x)], defaultdict.__new__, _fill_default),
    set: Base(lambda x: [*set.__iter__(x)], set.__new__, set.update),
    frozenset: Base(lambda x: [*frozenset.__iter__(x)], frozenset.__new__, frozenset.__new__, immutable=True),
    deque: Base(
        lambda x: [_MAXLEN.__get__(x), *deque.__iter__(x)],
        deque.__new__,
        lambda x, items: deque.__init__(x, items[1:], items[0]),
    ),
    types.SimpleNamespace: Base(_NO_ITEMS, types.SimpleNamespace.__new__, lambda *_: None),
    functools.partial: Base(
        lambda x: [x.func, x.args, x.keywords],
        lambda kind: functools.partial.__new__(kind, _of_dict),  # any function, until it is filled
        lambda x, items: functools.partial.__setstate__(x, (*items, None)),  # type: ignore[attr-defined]
    ),
}


class Opened(NamedTuple):
    """An object's contents, and what makes it again."""

    kind: Any  # a class, or a function of ``contents``, as Made
    names: tuple[str, ...] | None  # of its attributes; None if it is a dict that has its items for attributes
    parts: list[Any]  # items, values of attributes, values of slots


@dataclass(frozen=True, slots=True)
class Made:
    """Makes an object by a function of ``contents``."""

    make: Callable[..., Any]
    is_data: ClassVar[bool] = False

    def new(self) -> Any:
        """Return UNSET: the object can only be made from its parts."""
        return UNSET

    def filled(self, _: Any, __: Any, parts: list[Any]) -> Any:
        """Make the object."""
        return self.make(*parts)


class Container:
    """Opens the objects of a class, and makes them again. Immutable: any thread may call it, without the store's lock.

    ``is_data``: it is one of Python's containers, a subclass of one, a dataclass or a class of attrs: users access its
    contents directly. The contents of other classes are accessed by methods.
    """

    __slots__ = ("_attributed", "_base", "_dict", "_kind", "_slots", "is_data")

    def __init__(self, kind: type, base: type, attributes: Any, slots: tuple[Any, ...]) -> None:
        self._kind, self._base, self._dict, self._slots = kind, _BASES[base], attributes, slots
        self._attributed = attributes is not None or bool(slots)
        is_record = hasattr(kind, "__dataclass_fields__") or hasattr(kind, "__attrs_attrs__")
        self.is_data = is_record or base is not object

    def __call__(self, x: Any) -> Opened | None:
        """Return an object's contents; None if it must stay closed."""
        parts = self._base.items(x)
        if not self._attributed:  # most containers
            return Opened(self._kind, (), parts)
        names: tuple[str, ...] | None = ()
        more: list[Any] = []
        if self._dict is not None and (attributes := self._dict.__get__(x)):
            if attributes is x:
                names = None
            else:
                names, more = tuple(attributes), [*dict.values(attributes)]
        for slot in self._slots:
            try:
                more.append(slot.__get__(x))
            except AttributeError:
                more.append(UNSET)
        if more and _holds_live(more):
            return None
        return Opened(self._kind, names, parts + more if more else parts)

    def new(self) -> Any:
        """Return an empty object; UNSET if it can only be made from its contents."""
        return UNSET if self._base.immutable else self._base.new(self._kind)

    def filled(self, x: Any, names: tuple[str, ...] | None, parts: list[Any]) -> Any:
        """Fill an object that :meth:`new` made; return it."""
        slots = len(parts) - len(self._slots)
        attributes = slots - len(names or ())
        if x is UNSET:
            x = self._base.fill(self._kind, parts[:attributes])
        else:
            self._base.fill(x, parts[:attributes])
        if names is None:
            self._dict.__set__(x, x)
        elif names:
            self._dict.__get__(x).update(zip(names, parts[attributes:slots], strict=True))
        for slot, value in zip(self._slots, parts[slots:], strict=True):
            if value is not UNSET:
                slot.__set__(x, value)
        return x


def _make_method(function: Any, owner: Any) -> Any:
    return types.MethodType(function, owner)  # pickle cannot name this class


contents.register(types.MethodType, lambda x: (_make_method, (x.__func__, x.__self__)))


@functools.lru_cache(1024)
def opener_of(kind: type) -> Callable[[Any], Opened | None] | None:
    """Return the function that opens objects of a class; None if they hold no others, or stay closed."""
    function = contents.dispatch(kind)
    if function is _closed:  # nearly all classes
        return container_of(kind)

    def opened(x: Any) -> Opened | None:
        made = function(x)
        return made and Opened(Made(made[0]), (), [*made[1]])

    return opened


@functools.lru_cache(1024)
def container_of(kind: type) -> Container | None:
    """Return the container of a class; None if its objects hold no others, or stay closed."""
    if _is_closed(kind):
        return None
    base = next(b for b in kind.__mro__ if b in _BASES)  # the nearest: for an OrderedDict itself, not dict
    try:
        _BASES[base].new(kind)
    except TypeError:  # Python does not make an object of a class written in C so
        return None
    # a class written in C may have attributes of the same type as slots, but has no __slots__
    classes = [b.__dict__ for b in kind.__mro__ if "__slots__" in b.__dict__]
    slots = tuple(d for names in classes for d in names.values() if type(d) is types.MemberDescriptorType)
    attributes = next((b.__dict__["__dict__"] for b in kind.__mro__ if "__dict__" in b.__dict__), None)
    if isinstance(attributes, property):
        return None
    return Container(kind, base, attributes, slots)


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
