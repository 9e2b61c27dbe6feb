"""Dicts, lists and tuples of collections and futures, which a checkpoint takes under one name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from dask import is_dask_collection
from dask.core import flatten
from dask.delayed import Delayed
from dask.utils import key_split
from distributed import Future

from hpcgpu.checkpoint.content import digest
from hpcgpu.errors import ConfigError


def leaves(nest: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each collection and future with its place in the nest; ConfigError for anything else."""
    if type(nest) is dict and nest:
        for name, each in nest.items():
            yield from leaves(each, f"{path}[{name!r}]")
    elif type(nest) in (list, tuple) and nest:
        for i, each in enumerate(nest):
            yield from leaves(each, f"{path}[{i}]")
    elif isinstance(nest, Future) or is_dask_collection(nest):
        yield path, nest
    else:
        kind = "empty" if type(nest) in (dict, list, tuple) else f"of type {type(nest).__name__}"
        raise ConfigError(
            f"{path or 'the collection'} is {kind}: a checkpoint takes "
            "a Dask array, frame, bag, delayed value or future, or a dict, list or tuple of them"
        )


def filled(nest: Any, results: Iterator[Any]) -> Any:
    """Return the nest with results in place of its leaves, in their order."""
    if type(nest) is dict:
        return {name: filled(each, results) for name, each in nest.items()}
    if type(nest) in (list, tuple):
        return type(nest)([filled(each, results) for each in nest])
    return next(results)


def as_collection(leaf: Any) -> Any:
    """Return a future as a delayed value with a key of its own: to read that one is not to wait for the future."""
    if not isinstance(leaf, Future):
        return leaf
    key = f"{key_split(leaf.key)}-{digest([str(leaf.key)])}"
    return Delayed(key, {key: leaf})


def keys_of(collections: Iterable[Any]) -> list[Any]:
    """Return the keys of the chunks of collections, each once."""
    return list(dict.fromkeys(flatten([collection.__dask_keys__() for collection in collections])))


def rebuilt(collection: Any, chunks: dict[Any, Any]) -> Any:
    """Return a collection with other tasks, or futures, for its chunks."""
    rebuild, arguments = collection.__dask_postpersist__()
    return rebuild({key: chunks[key] for key in keys_of([collection])}, *arguments)
