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
from dask.sizeof import sizeof
from dask.tokenize import normalize_token
from dask.utils import Dispatch

from hpcgpu.spill.proxy import Proxy, call, for_each_class, source_of, unproxy


@functools.cache
def register() -> None:
    """Make proxies known to dask, in this process; again does nothing.

    A message to another process holds the object, as it would be sent without a proxy, and needs no registration
    there. To send something else, such as bytes that are on the host already, put it in before, by
    :func:`hpcgpu.spill.proxy.replaced`.
    """
    from distributed.protocol import dask_serialize
    from distributed.protocol.cuda import cuda_serialize

    sizeof.register(Proxy, lambda proxy: source_of(proxy).nbytes)
    normalize_token.register(Proxy, lambda proxy: normalize_token(unproxy(proxy)))
    dask_serialize.register(Proxy, functools.partial(_dumps, dask_serialize))
    cuda_serialize.register(Proxy, functools.partial(_dumps, cuda_serialize))
    for module in ("dask.array.dispatch", "dask.dataframe.dispatch"):
        wrapt.register_post_import_hook(_register_tables, module)


def _dumps(table: Dispatch, proxy: Any) -> Any:  # noqa: ANN401
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
    tables = [table for table in vars(module).values() if isinstance(table, Dispatch)]

    def enter(cls: type[Proxy]) -> None:
        for table in tables:
            table.register(cls, _delegate(table, cls._self_kind))

    for_each_class(enter)


def _delegate(table: Dispatch, kind: type) -> Callable[..., Any]:
    """Return a function that calls what a table has for a class, with the objects."""
    return lambda *args, **kwargs: call(table.dispatch(kind), args, kwargs)
