"""Objects that hold arrays: their content is read and set as by Python itself; no code of the object's class runs.

An object stays closed if it has more than its content, or if a copy cannot replace it; ``contents`` has the functions
that open such objects all the same.
"""

from __future__ import annotations

import copyreg
import functools
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from hpcgpu.errors import SpillError

# Most objects in containers are of these types, and hold no other objects.
SIMPLE: frozenset[type] = frozenset(
    {int, str, float, bool, bytes, complex, type(None), np.float64, np.float32, np.int64, np.int32, np.bool_, type}
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
_FACTORY: Any = defaultdict.__dict__["default_factory"]
_MAXLEN: Any = deque.__dict__["maxlen"]
_NO_ITEMS: Callable[[Any], list[Any]] = lambda _: []  # noqa: E731 - as the others in the table


class Unset:
    """The class itself stands for a slot without a value, and for an object not made yet."""


@functools.singledispatch
def contents(x: Any) -> tuple[Callable[..., Any], Iterable[Any]] | None:
    """Return how the store takes the arrays out of an object, and makes it again.

    Register a function for a class of your own that the store does not open by itself: a compiled class, or one with a
    ``__reduce__`` or ``__del__``. Register it in the module of the class, so that every worker does. It holds for
    subclasses, too. docs/explanation/memory.md has an example.

    Parameters
    ----------
    x : object
        An object of the class.

    Returns
    -------
    tuple or None
        A function of a module (or the class itself), and the arguments with which it makes the object again; they may
        hold arrays to any depth. With None the object stays as it is, and its arrays stay on the device.

    """
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


def _fill_default(x: Any, items: list[Any]) -> None:
    _FACTORY.__set__(x, items[0])
    _fill_dict(x, items[1:])


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


class Node(NamedTuple):
    """An object's contents, and what makes it again."""

    kind: Any  # a class, or a function of ``contents``, as Made
    names: tuple[str, ...] | None  # of its attributes; None if it is a dict that has its items for attributes
    parts: Sequence[Any]  # items, values of attributes, values of slots, not copied; in a skeleton also Slot and Ref


@dataclass(frozen=True, slots=True)
class Made:
    """Makes an object by a function of ``contents``."""

    make: Callable[..., Any]
    is_data: ClassVar[bool] = False

    def new(self) -> Any:
        """Return Unset: the object can only be made from its parts."""
        return Unset

    def filled(self, _: Any, __: Any, parts: list[Any]) -> Any:
        """Make the object."""
        return self.make(*parts)


class Container:
    """Opens the objects of a class, and makes them again. Immutable: any thread may call it, without the store's lock.

    ``is_data``: it is one of Python's containers, a subclass of one, a dataclass or a class of attrs: users access its
    contents directly. The contents of other classes are accessed by methods.
    """

    __slots__ = ("_base", "_dict", "_kind", "_slots", "is_data")

    def __init__(self, kind: type, base: type, attributes: Any, slots: tuple[Any, ...]) -> None:
        self._kind, self._base, self._dict, self._slots = kind, _BASES[base], attributes, slots
        is_record = hasattr(kind, "__dataclass_fields__") or hasattr(kind, "__attrs_attrs__")
        self.is_data = is_record or base is not object

    def __call__(self, x: Any) -> Node | None:
        """Return an object's contents; None if it must stay closed."""
        parts = self._base.items(x)
        if self._dict is None and not self._slots:  # most containers
            return Node(self._kind, (), parts)
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
                more.append(Unset)
        if any(map(_is_live, {*map(type, more)} - SIMPLE)):
            return None
        return Node(self._kind, names, parts + more if more else parts)

    def new(self) -> Any:
        """Return an empty object; Unset if it can only be made from its contents."""
        return Unset if self._base.immutable else self._base.new(self._kind)

    def filled(self, x: Any, names: tuple[str, ...] | None, parts: list[Any]) -> Any:
        """Fill an object that :meth:`new` made; return it."""
        slots = len(parts) - len(self._slots)
        attributes = slots - len(names or ())
        if x is Unset:
            x = self._base.fill(self._kind, parts[:attributes])
        else:
            self._base.fill(x, parts[:attributes])
        if names is None:
            self._dict.__set__(x, x)
        elif names:
            self._dict.__get__(x).update(zip(names, parts[attributes:slots], strict=True))
        for slot, value in zip(self._slots, parts[slots:], strict=True):
            if value is not Unset:
                slot.__set__(x, value)
        return x


def _make_method(function: Any, owner: Any) -> Any:
    return types.MethodType(function, owner)  # pickle cannot name this class


contents.register(types.MethodType, lambda x: (_make_method, (x.__func__, x.__self__)))


@functools.lru_cache(1024)
def opener_of(kind: type) -> Callable[[Any], Node | None] | None:
    """Return the function that opens objects of a class; None if they hold no others, or stay closed."""
    function = contents.dispatch(kind)
    if function is _closed:  # nearly all classes
        return container_of(kind)

    def opened(x: Any) -> Node | None:
        made = function(x)
        return made and Node(Made(made[0]), (), [*made[1]])

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


@functools.lru_cache(1024)
def _is_live(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _LIVE_ROOTS or issubclass(kind, _LIVE_KINDS)


class Skeleton(NamedTuple):
    """A value without its arrays: the objects that lead to arrays, each once, the value itself last.

    It is flat, and its nodes are not of the objects' classes. So no code of these classes runs when it is pickled (it
    would find slots where it expects arrays), and Python does not run out of stack, however deep objects are nested.
    """

    nodes: tuple[Node, ...]


def is_data(skeleton: Any) -> bool:
    """Tell whether arrays lie in containers and records only, and in no object whose methods use them."""
    return type(skeleton) is not Skeleton or all(maker_of(node.kind).is_data for node in skeleton.nodes)


def maker_of(kind: Any) -> Container | Made:
    """Return what makes objects of a kind; raise SpillError if nothing does."""
    if isinstance(kind, Made):
        return kind
    if (maker := container_of(kind)) is None:
        raise SpillError(f"an object of {kind.__module__}.{kind.__qualname__} cannot be made again from its contents")
    return maker
