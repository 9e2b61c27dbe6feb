"""One object in a task's value as its proxy sees it: its unit, the way to bring it up; and proxies' entries in dask.

dask's tables look at ``type(x)``, and must treat a proxy like its object. The tables of ``dask.array`` and
``dask.dataframe`` get an entry for each class of proxies, since dask also looks up a class without an object. They get
these entries when their modules are imported, if ever.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import wrapt

from hpcgpu.spill.proxies import Resident
from hpcgpu.spill.proxies.proxy import Proxy, call, for_each_class, is_proxy, make_proxy, release, source_of, unproxy
from hpcgpu.spill.values.unit import ObjectContent


class Token:
    """The name that a stored object gives its content. It outlives the stored object."""

    __slots__ = ("content",)

    def __init__(self, content: ObjectContent) -> None:
        self.content = content


class StoredObject:
    """A device array, or a big object in host memory, inside a stored value: it lives as long as it has a proxy."""

    # Thread-safe: proxies call it in the threads of tasks, and the store (release) in the thread that moves the object
    # down.

    __slots__ = ("__weakref__", "_proxy", "index", "kind", "nbytes", "reader", "token", "unit")

    def __init__(self, reader: Any, unit: ObjectContent, index: int) -> None:
        self.reader, self.unit, self.index = reader, unit, index  # a hpcgpu.spill.store.identity_map.Reader
        self.kind, self.nbytes = unit.kind_of(index), unit.nbytes
        self.token = Token(unit)
        self._proxy: Any = None

    def __del__(self) -> None:
        # no lock here: the garbage collector may run this in a thread that holds it
        self.reader.orphans.append(self.token)

    def proxy(self) -> Any:
        """Return the object's proxy: the existing one, or a new one."""
        made = None
        while True:
            with self.reader.lock:
                proxy = self._proxy() if self._proxy is not None else None
                if proxy is None and made is not None:
                    self._proxy, proxy = weakref.ref(made), made
            if proxy is not None:
                return proxy
            made = make_proxy(self)

    def release(self) -> None:
        """Take the object from its proxy, if there is one, since the object moves down."""
        if self._proxy is not None and (proxy := self._proxy()) is not None:
            release(proxy)

    def length(self) -> int | None:
        """Return the object's ``len`` from a copy below, without loading; None without such a copy."""
        return self.unit.length_of(self.index)

    def up(self) -> Any:
        """Bring the object up, and return it; raises SpillError as the store does."""
        with self.using() as value:
            return value

    @contextmanager
    def using(self) -> Iterator[Any]:
        """Keep the object up while inside, and return it."""
        with self.reader.keeping_up(self.unit):
            yield self.unit.object_at(self.index)

    def dirty(self) -> None:
        """Record that the object was written to, so that copies of it do not count."""
        self.reader.written(self.unit)


def asproxy(x: Any) -> Any:
    """Return a proxy of an object that is up; return a proxy, or None, as it is."""
    register()
    return x if x is None or is_proxy(x) else make_proxy(Resident(x))


@functools.cache
def register() -> None:
    """Register proxies with dask, in this process, when dask is imported; a second call does nothing."""
    # A message to another process has the object, and needs no registration there. To send other data, such as bytes
    # that are on the host already, replace the proxies before by hpcgpu.spill.proxies.proxy.replaced.
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

    def enter(cls: type[Proxy], kind: type) -> None:
        for table in tables:
            table.register(cls, _delegate(table, kind))

    for_each_class(enter)


def _delegate(table: Any, kind: type) -> Callable[..., Any]:
    """Return a function that calls a table's function for a class, with the objects of proxies."""
    return lambda *args, **kwargs: call(table.dispatch(kind), args, kwargs)
