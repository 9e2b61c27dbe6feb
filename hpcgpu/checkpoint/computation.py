"""The identity of a computation: whether a collection is the one of last time, and how it differs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from dask import is_dask_collection
from dask._task_spec import convert_legacy_graph  # as the scheduler reads graphs (dask 2026.8.0)
from dask.utils import key_split

from hpcgpu.checkpoint.content import Contents, digest
from hpcgpu.checkpoint.nests import as_collection, keys_of, leaves

_MOST_TASKS = 50_000  # whose contents are compared: a task takes 0.1 ms
_SHOWN, _SHOWN_CHARACTERS = 3, 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Computation:
    """A collection's form, and a digest of its graph. Immutable."""

    facts: dict[str, str]  # type, shape, chunks, dtype, columns
    tasks: dict[str, int] = field(default_factory=dict)  # by the names of functions
    digests: dict[str, str] = field(default_factory=dict)  # likewise, of what these tasks compute

    @classmethod
    def of(cls, nest: Any, futures: Mapping[Any, str]) -> Self:
        """Describe a collection, or a nest of them; ``futures`` has digests of keys that are futures now."""
        places = {place: as_collection(leaf) for place, leaf in leaves(nest)}
        graph: dict[Any, Any] = {}
        for collection in places.values():
            graph |= convert_legacy_graph(dict(collection.__dask_graph__()))
        names = {key: str(key) for key in graph} if len(graph) > _MOST_TASKS else Contents().digests(graph, futures)
        prefixes: dict[str, set[str]] = {}
        for key in graph:
            prefixes.setdefault(key_split(key), set()).add(names[key])
        outputs = [names.get(key, futures.get(key, str(key))) for each in places.values() for key in keys_of([each])]
        digests = {prefix: digest(sorted(each)) for prefix, each in prefixes.items()}
        facts = {} if "" in places else {"type": type(nest).__name__}
        for place, collection in places.items():
            facts |= {f"{place} {name}".lstrip(): fact for name, fact in _facts(collection).items()}
        return cls(facts=facts, tasks=dict(Counter(map(key_split, graph))), digests={**digests, "": digest(outputs)})

    def differences(self, other: Computation, *, alike: bool) -> list[str]:
        """Return in what the other one, a later one, differs; ``alike``: only in form, and in kinds of tasks."""
        texts = [
            f"{name} {_short(self.facts.get(name, 'none'))} there, {_short(other.facts.get(name, 'none'))} now"
            for name in dict.fromkeys((*self.facts, *other.facts))
            if self.facts.get(name) != other.facts.get(name)
        ]
        before, now = (self.tasks, other.tasks) if alike else (self.digests, other.digests)
        if len(texts) > _SHOWN:
            texts = [*texts[:_SHOWN], f"{len(texts) - _SHOWN} more"]
        if texts or before == now or (not alike and self.digests[""] == other.digests[""]):
            return texts
        if kinds := sorted(self.tasks.keys() ^ other.tasks.keys()):
            return [f"the graph: only one of them has tasks {_listed(kinds)}"]
        changed = [name for name in other.tasks if before.get(name) != now.get(name)]
        return [f"the graph: tasks {_listed(changed)} have other arguments, functions or numbers"]


def _facts(collection: Any) -> dict[str, str]:
    """Return a collection's form. The lengths of frames are not known before they are computed."""
    kind = type(collection)
    facts = {"type": f"{kind.__module__}.{kind.__qualname__}"}
    if type(dtypes := getattr(collection, "dtypes", None)).__name__ == "Series":
        facts["columns"] = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())  # type: ignore[union-attr]
    for name in ("shape", "chunks", "dtype") if "array" in kind.__module__ else ("dtype",):
        value = getattr(collection, name, None)
        if value is not None and not is_dask_collection(value):  # a delayed has every attribute
            facts[name] = str(value)
    if "array" not in kind.__module__:
        facts["number of chunks"] = str(len(keys_of([collection])))
    return facts


def _listed(names: list[str]) -> str:
    return ", ".join(repr(name) for name in names[:_SHOWN]) + (" ..." if len(names) > _SHOWN else "")


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
