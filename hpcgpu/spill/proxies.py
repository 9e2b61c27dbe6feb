"""Proxies of stored objects: an object comes up when its proxy is first touched, and is released when it is evicted.

Each class of objects has a class of proxies, with the same name. Code that looks at names (dask's ``is_cupy_type``, the
dashboard) or at ``__class__`` (``isinstance``) takes a proxy for the object, and does not bring it up. Code that looks
at ``type(x)`` does not: dask's tables (see :func:`register`), ``memoryview``, and compiled code such as CuPy's, which
needs :func:`unproxy`. A proxy notices writes to its object by items, attributes, in-place operators, ``out=``, and the
methods and functions below, but not to a view (``p[2:5]``, ``p.T``, ``p.values``).

While the object is not up, wrapt holds a placeholder for it: wrapt's own way to load late (``__wrapped_factory__``,
2.5.2) cannot be undone, since ``del proxy.__wrapped__`` is an error. During an operation wrapt keeps a reference of its
own to the object, so an eviction meanwhile does not take it away from the operation.
"""

from __future__ import annotations

import copy
import copyreg
import functools
import math
import operator
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import wrapt

from hpcgpu.errors import SpillError
from hpcgpu.spill.values.take_apart import put_together, take_apart

BASE: Any = wrapt.BaseObjectProxy
# the C slot itself; a proxy's __wrapped__ is never a placeholder
HELD: Any = BASE.__wrapped__
# The special methods that wrapt calls on the held object; the proxy itself defines the operators.
_TOUCHES: dict[str, Callable[..., Any]] = {
    **{"iter": iter, "hash": hash, "str": str, "bool": bool, "int": int, "float": float, "dir": dir},
    **{"complex": complex, "bytes": bytes, "format": format, "reversed": reversed, "round": round},
    **{"trunc": math.trunc, "floor": math.floor, "ceil": math.ceil, "index": operator.index},
    **{"getitem": operator.getitem, "contains": operator.contains},
}
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
_BUILTIN: dict[str, Callable[..., Any]] = {"pow": pow, "divmod": divmod}  # operator's pow takes no third argument
_CLASSES: dict[type, type[Proxy]] = {}
_tables: list[Any] = []  # dask's, which look at type(x)


class Source(Protocol):
    """The source of a proxy's object, with its class and bytes.

    Thread-safe: proxies call it in the threads that use them, in several at once. To load may take as long as a copy.
    """

    @property
    def kind(self) -> type: ...  # noqa: D102
    @property
    def nbytes(self) -> int: ...  # noqa: D102

    def answers(self) -> Mapping[str, Any]:
        """Return the object's ``len`` and ``name`` as far as copies of it have them."""

    def using(self) -> AbstractContextManager[Any]:
        """Bring the object up, return it, and keep it up while inside; several threads may share a load."""

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

    def __len__(self) -> int:
        state = _state_of(self)
        length = state.source.answers().get("len")
        return len(state.load()) if length is None else length

    def __getattribute__(self, name: str) -> Any:
        state = _state_of(self)
        if name.startswith("__") and name.endswith("__"):
            kind = state.source.kind
            if name in ("__module__", "__doc__"):  # wrapt asks when a proxy is made (2.5.2, raw_init)
                return getattr(kind, name)
            if not defines(kind, name):  # so that is_dask_collection and the like load no object
                raise AttributeError(f"{kind.__name__!r} object has no attribute {name!r}")
        elif name == "name" and name in (answers := state.source.answers()):
            return answers[name]
        return getattr(state.load(), name)


_state_of: Callable[[Placeholder], State] = Placeholder.__dict__["_state"].__get__
for _name, _operation in _TOUCHES.items():
    setattr(Placeholder, f"__{_name}__", lambda self, *args, do=_operation: do(_state_of(self).load(), *args))


def up(source: Source) -> Any:
    """Bring the object of a source up, and return it; raises as :func:`_keep_up`."""
    with ExitStack() as stack:
        return _keep_up(stack, source)


def _keep_up(stack: ExitStack, source: Source) -> Any:
    """Bring the object of a source up until the stack ends; SpillError for all errors but MemoryError."""
    try:
        return stack.enter_context(source.using())
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

    def answers(self) -> Mapping[str, Any]:
        """Return nothing: the object is up."""
        return {}

    def using(self) -> AbstractContextManager[Any]:
        """Return the object."""
        return nullcontext(self._value)

    def dirty(self) -> None:
        """Do nothing: there are no copies."""


class _Meta(type):
    """Class of the proxies' classes, pickled as the object's class: dask writes an object's class into messages."""


class Proxy(BASE, metaclass=_Meta):
    """Root of the proxies' classes, which :func:`make_proxy` makes.

    Shape, dtype and all other attributes are the object's. Several threads may use a proxy at once, if they may use the
    object at once: it comes up once, and stays up during an operation.
    """

    _self_kind: type = object

    def __init__(self, source: Source) -> None:
        self._self_state = State(source)
        super().__init__(Placeholder(self._self_state))
        self._self_state.proxy = weakref.ref(self)

    @property  # type: ignore[misc] # of object it can be set, too
    def __class__(self) -> Any:
        return self._self_state.source.kind

    @property
    def __wrapped__(self) -> Any:
        held = HELD.__get__(self)
        return self._self_state.load() if type(held) is Placeholder else held

    @staticmethod
    def __wrapped_setattr_fixups__() -> None:
        """Do nothing: wrapt 2.5.2 looks it up whenever the slot is set, and else would take the object's."""

    def __repr__(self) -> str:
        # without loading: distributed logs the arguments of a failed task on the event loop
        source = self._self_state.source
        return f"<proxy of {source.kind.__module__}.{source.kind.__qualname__}, {source.nbytes} bytes>"

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_self_"):
            super().__setattr__(name, value)
        else:
            _write(self, setattr, name, unproxy(value))

    def __delattr__(self, name: str) -> None:
        _write(self, delattr, name)

    def __setitem__(self, index: Any, value: Any) -> None:
        whole = issubclass(self._self_state.source.kind, (list, dict))  # these keep a proxy as any other object
        _write(self, operator.setitem, unproxy(index), value if whole else unproxy(value))

    def __delitem__(self, index: Any) -> None:
        _write(self, operator.delitem, unproxy(index))

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        return call(getattr(ufunc, method), inputs, kwargs)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return call(function, args, kwargs)

    def __copy__(self) -> Any:
        return copy.copy(self.__wrapped__)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.__wrapped__, memo)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return operator.getitem, ((self.__wrapped__,), 0)  # the other process may not have this package

    def __reduce_ex__(self, _: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.__reduce__()


def _forward(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Return an operator that applies ``operation`` to the objects of its operands."""

    def forward(self: Any, *others: Any) -> Any:
        with ExitStack() as stack:
            return operation(*[_enter(stack, x) for x in (self, *others)])

    return forward


def _inplace(operation: Callable[..., Any]) -> Callable[..., Any]:
    def write(self: Any, other: Any) -> Any:
        with ExitStack() as stack:
            return _write(self, operation, _enter(stack, other))

    return write


for _name in "add sub mul matmul pow truediv floordiv mod divmod lshift rshift and or xor".split():
    _forwards = _forward(_BUILTIN.get(_name) or getattr(operator, f"__{_name}__"))
    setattr(Proxy, f"__{_name}__", _forwards)
    setattr(Proxy, f"__r{_name}__", lambda self, other, *more, do=_forwards: do(other, self, *more))
    if _name != "divmod":
        setattr(Proxy, f"__i{_name}__", _inplace(getattr(operator, f"__i{_name}__")))
for _name in ("eq", "ne", "lt", "le", "gt", "ge", "neg", "pos", "abs", "invert"):
    setattr(Proxy, f"__{_name}__", _forward(getattr(operator, _name)))


def _enter(stack: ExitStack, x: Any) -> Any:
    """Return the object of a proxy, which stays up until the stack ends; return another object as it is."""
    return _keep_up(stack, source_of(x)) if is_proxy(x) else x


def _write(proxy: Any, operation: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Let an operation write to the object of a proxy; if the result is the object, return the proxy."""
    with ExitStack() as stack:
        value = _enter(stack, proxy)
        try:
            result = operation(value, *args, **kwargs)
        finally:  # after a partial write, too; and while the object is kept up, so that no copy is made in between
            source_of(proxy).dirty()
        return proxy if result is value else result


def call(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a function with the objects of all proxies, which stay up meanwhile."""
    fills = function in _FILLS or getattr(function, "__name__", "") == "at"  # np.add.at
    fills = fills or kwargs.get("copy") is False or kwargs.get("overwrite_input")
    _, targets = take_apart((args[:1], kwargs) if fills else kwargs.get("out"), is_proxy)
    with ExitStack() as stack:
        args, kwargs = _replaced((args, kwargs), lambda proxy: _enter(stack, proxy))
        try:
            result = function(*args, **kwargs)
        finally:
            for proxy in targets:
                source_of(proxy).dirty()
        if not targets:
            return result
        by_id = {id(_enter(stack, proxy)): proxy for proxy in targets}
        return tuple(by_id.get(id(r), r) for r in result) if type(result) is tuple else by_id.get(id(result), result)


def _replaced(x: Any, by: Callable[[Any], Any]) -> Any:
    """Return a value with the results of ``by`` in place of the proxies that :func:`take_apart` finds."""
    skeleton, proxies = take_apart(x, is_proxy)
    return put_together(skeleton, [by(p) for p in proxies]) if proxies else x


def _class_of(kind: type) -> type[Proxy]:
    """Return the proxies' class for a class of objects."""
    special: dict[str, Any] = {}
    if defines(kind, "__iter__") or defines(kind, "__getitem__"):
        special["__iter__"] = lambda self: iter(HELD.__get__(self))
    if not issubclass(kind, Mapping):  # a class written in Python with it is a sequence to numpy
        special["__getitem__"] = lambda self, i: HELD.__get__(self)[i if type(i) in (int, str, slice) else unproxy(i)]
    if defines(kind, "__call__"):
        special["__call__"] = lambda self, *args, **kwargs: self.__wrapped__(*args, **kwargs)
    if defines(kind, "__next__"):
        special["__next__"] = lambda self: next(self.__wrapped__)
    for name in METHODS | INPLACE_METHODS:
        if hasattr(kind, name) or defines(kind, "__getattr__"):  # SimArray's methods are not in its class
            special[name] = _writer(name)
    for name in INDEXERS:
        if hasattr(kind, name):
            special[name] = property(lambda self, name=name: _write(self, getattr, name))  # type: ignore[misc]
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "_self_kind": kind}
    made: Any = _Meta(kind.__name__, (Proxy,), special | names)
    return made


def _writer(name: str) -> property:
    def look_up(self: Any) -> Any:
        attribute = getattr(self.__wrapped__, name)
        if not callable(attribute):
            return attribute

        def method(*args: Any, **kwargs: Any) -> Any:
            if name in INPLACE_METHODS and not kwargs.get("inplace"):
                return attribute(*args, **kwargs)
            return _write(self, lambda value: getattr(value, name)(*args, **kwargs))

        return method

    return property(look_up)


def _pickled(cls: Any) -> Any:
    return "Proxy" if cls is Proxy else (operator.getitem, ((cls._self_kind,), 0))


copyreg.pickle(_Meta, _pickled)


def make_proxy(source: Source) -> Any:
    """Return a proxy for the object of a source, without loading the object."""
    cls = _CLASSES.get(source.kind)
    if cls is None:
        cls = _class_of(source.kind)
        _register_class(cls, _tables)
        cls = _CLASSES.setdefault(source.kind, cls)
    return cls(source)


def is_proxy(x: object) -> bool:
    """Tell whether an object is a proxy, without loading its object."""
    return issubclass(type(x), Proxy)


def source_of(proxy: Any) -> Source:
    """Return the source of a proxy."""
    return proxy._self_state.source


def release(proxy: Any) -> None:
    """Take the object from a proxy, which loads it again at the next touch. Operations under way keep the object."""
    state: State = proxy._self_state
    state.token = object()
    HELD.__set__(proxy, Placeholder(state))


def unproxy(x: Any) -> Any:
    """Return a value with objects in place of all proxies, also inside them; SpillError if one cannot come up."""
    return _replaced(x, lambda proxy: unproxy(up(source_of(proxy))))


def asproxy(x: Any) -> Any:
    """Return a proxy of an object that is up; return a proxy, or None, as it is."""
    register()
    return x if x is None or is_proxy(x) else make_proxy(Resident(x))


@functools.cache
def register() -> None:
    """Register proxies with dask when it is imported, once, in this process; others get messages with the object."""
    wrapt.register_post_import_hook(_register_size, "dask.sizeof")
    wrapt.register_post_import_hook(_register_token, "dask.tokenize")
    wrapt.register_post_import_hook(_register_messages, "distributed.protocol")
    for module in ("dask.array.dispatch", "dask.dataframe.dispatch"):
        wrapt.register_post_import_hook(_register_tables, module)


# These import the module themselves: another thread may be in the middle of its import.
def _register_size(_: ModuleType) -> None:
    from dask.sizeof import sizeof

    sizeof.register(Proxy, lambda proxy: source_of(proxy).nbytes)


def _register_token(_: ModuleType) -> None:
    from dask.tokenize import normalize_token

    normalize_token.register(Proxy, lambda proxy: normalize_token(unproxy(proxy)))


def _register_messages(_: ModuleType) -> None:
    from distributed.protocol import dask_serialize
    from distributed.protocol.cuda import cuda_serialize

    for table in (dask_serialize, cuda_serialize):
        table.register(Proxy, functools.partial(_dumps, table))


def _dumps(table: Any, proxy: Any) -> Any:
    """Return header and frames of the object; the message also has the object's class (``_pickled``)."""
    kind = source_of(proxy).kind
    try:
        dumps = table.dispatch(kind)
    except TypeError:
        raise NotImplementedError(kind) from None  # distributed goes on to the next family
    if kind.__module__ == "__main__":  # cloudpickle would pickle the class of proxies by value
        raise NotImplementedError(kind)
    return dumps(unproxy(proxy))


def _register_tables(module: ModuleType) -> None:
    from dask.utils import Dispatch

    tables = [table for table in vars(module).values() if isinstance(table, Dispatch)]
    _tables.extend(tables)
    for cls in list(_CLASSES.values()):
        _register_class(cls, tables)


def _register_class(cls: type[Proxy], tables: Sequence[Any]) -> None:
    """Let tables call the functions of the objects' class, with the objects of proxies."""
    for table in list(tables):
        table.register(cls, functools.partial(_delegate, table, cls._self_kind))


def _delegate(table: Any, kind: type, *args: Any, **kwargs: Any) -> Any:
    return call(table.dispatch(kind), args, kwargs)
