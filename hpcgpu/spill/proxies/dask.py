"""What dask must know of proxies: where it looks at ``type(x)``, it does for a proxy what it does for the object.

The tables of ``dask.array`` and ``dask.dataframe`` get an entry for each of the proxies' classes, for they also ask
them about a class without an object; they get them when these modules are imported, if ever.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import wrapt

from hpcgpu.spill.proxies.proxy import Proxy, call, for_each_class, is_proxy, make_proxy, source_of, unproxy
from hpcgpu.spill.proxies.stub import Here


def asproxy(x: Any) -> Any:  # noqa: ANN401
    """Return a proxy of an object that is up; of a proxy, and of None, itself."""
    register()
    return x if x is None or is_proxy(x) else make_proxy(Here(x))


@functools.cache
def register() -> None:
    """Make proxies known to dask, in this process, where and when it is imported; again does nothing.

    A message to another process holds the object, as it would be sent without a proxy, and needs no registration
    there. To send something else, such as bytes that are on the host already, put it in before, by
    :func:`hpcgpu.spill.proxies.proxy.replaced`.
    """
    wrapt.register_post_import_hook(_register_size, "dask.sizeof")
    wrapt.register_post_import_hook(_register_token, "dask.tokenize")
    wrapt.register_post_import_hook(_register_messages, "distributed.protocol")
    for module in ("dask.array.dispatch", "dask.dataframe.dispatch"):
        wrapt.register_post_import_hook(_register_tables, module)


# They import what they are called with: another thread may be in the midst of that.
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


def _dumps(table: Any, proxy: Any) -> Any:  # noqa: ANN401
    """Return header and frames of the object; the class beside them in the message is the object's (``_pickled``)."""
    kind = source_of(proxy).kind
    try:
        dumps = table.dispatch(kind)
    except TypeError:
        raise NotImplementedError(kind) from None  # distributed goes on to the next family
    if kind.__module__ == "__main__":  # cloudpickle would take the proxies' class by value
        raise NotImplementedError(kind)
    return dumps(unproxy(proxy))


def _register_tables(module: ModuleType) -> None:
    from dask.utils import Dispatch

    tables = [table for table in vars(module).values() if isinstance(table, Dispatch)]

    def enter(cls: type[Proxy]) -> None:
        for table in tables:
            table.register(cls, _delegate(table, cls._self_kind))

    for_each_class(enter)


def _delegate(table: Any, kind: type) -> Callable[..., Any]:  # noqa: ANN401
    """Return a function that calls what a table has for a class, with the objects."""
    return lambda *args, **kwargs: call(table.dispatch(kind), args, kwargs)
