"""The content of tasks, as text: the same in each start of a script.

Dask's tokens are not: it pickles functions that cannot be imported (of the script, closures, decorated ones: also
``da.ones``), and such pickles have file names and lines, random names of classes, and depend on whether a module was
compiled or came from a .pyc file (dask 2026.8.0, cloudpickle 3.1).
"""

from __future__ import annotations

import copyreg
import dis
import functools
import hashlib
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from types import CodeType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

import numpy as np
from dask._task_spec import Alias, DataNode, GraphNode, Task, TaskRef
from dask.base import normalize_token, tokenize

_ATOMS = (str, bytes, bool, int, float, complex, type(None), type(Ellipsis), np.dtype)
_CODE = (
    *("co_code", "co_exceptiontable", "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_flags"),
    *("co_argcount", "co_posonlyargcount", "co_kwonlyargcount", "co_consts"),
)
# Attributes of classes that are made anew for each, or say nothing of what it does; the second line has Python 3.13's.
_OF_A_CLASS = {
    *("__dict__", "__weakref__", "__module__", "__doc__", "__annotations__", "_abc_impl", "__qualname__"),
    *("__firstlineno__", "__static_attributes__", "__annotate_func__", "__annotations_cache__"),
}
# Dask's tokens of what may contain functions.
_OF_CONTAINERS = {normalize_token.dispatch(kind) for kind in (object, functools.partial, MethodType, OrderedDict)}
_MAPPINGS, _SEQUENCES = (dict, MappingProxyType), (list, tuple)


class Contents:
    """The contents of tasks of one graph."""

    def __init__(self) -> None:
        self._active: dict[int, int] = {}  # objects that contain the current one, by id, and their depths
        self._functions: dict[int, tuple[Any, str]] = {}  # by id; they live as long as their ids are in use here

    def digests(self, graph: Mapping[Any, GraphNode], names: Mapping[Any, str]) -> dict[Any, str]:
        """Return a digest for each key; ``names`` has those of keys that are not in the graph."""
        digests: dict[Any, str] = {}
        for start in graph:
            stack = [start]
            while stack:
                key = stack[-1]
                node = graph[key]
                missing = [d for d in node.dependencies if d in graph and d not in digests and d != key]
                if missing and key not in digests:
                    stack += missing
                    continue
                stack.pop()
                if key not in digests:
                    inputs = {d: digests.get(d, names.get(d, str(d))) for d in node.dependencies}
                    digests[key] = self._digest(key, node, inputs)
        return digests

    def _digest(self, key: Any, node: GraphNode, inputs: Mapping[Any, str]) -> str:
        try:
            content = self._node(node, inputs)
        except Exception:  # of an object that cannot be pickled, nor taken apart: its key is all there is
            return str(key)
        finally:
            self._active.clear()
        return content if isinstance(content, str) else digest([repr(content)])

    def _node(self, node: GraphNode, inputs: Mapping[Any, str]) -> Any:
        """Return a task's content; of an alias or of fused tasks that of the task which makes the value."""
        if isinstance(node, Alias):
            return inputs[node.target]
        if isinstance(node, DataNode):
            return "data", self.of(node.value)
        assert isinstance(node, Task)
        take = functools.partial(self.of, inputs=inputs)
        if node.has_subgraph():
            tasks, output, outer, *references = node.args
            return self.digests(tasks, dict(zip(outer, map(take, references), strict=True)))[output]
        return self.of(node.func), take(node.args), take(node.kwargs)

    def of(self, value: Any, inputs: Mapping[Any, str] | None = None) -> Any:
        """Return the content of a value: tuples of texts and numbers; raises for what cannot be taken apart."""
        if isinstance(value, TaskRef):
            return (inputs or {})[value.key]
        if type(value) in _ATOMS:
            return value if type(value) is not np.dtype else str(value)
        if id(value) in self._active:
            return "above by", len(self._active) - self._active[id(value)]
        self._active[id(value)] = len(self._active)
        try:
            return self._parts(value, functools.partial(self.of, inputs=inputs), inputs)
        finally:
            self._active.pop(id(value), None)

    def _parts(self, value: Any, of: Callable[[Any], Any], inputs: Mapping[Any, str] | None) -> Any:
        kind = type(value)
        if isinstance(value, GraphNode):
            return kind.__name__, self._node(value, inputs or {})
        if kind in _SEQUENCES:
            return kind.__name__, *map(of, value)
        if kind in _MAPPINGS:
            return "dict", *sorted(((of(key), of(item)) for key, item in value.items()), key=repr)
        if kind in (set, frozenset):
            return "set", *sorted(map(of, value), key=repr)
        if isinstance(value, ModuleType):
            return "module", value.__name__
        if isinstance(value, np.ndarray) and value.dtype.hasobject:
            return "objects", str(value.dtype), value.shape, of(value.ravel().tolist())
        if isinstance(value, FunctionType | type):
            return _imported(value) or self._defined(value)
        if kind is CodeType:
            return "code", *(of(getattr(value, name)) for name in _CODE)
        if isinstance(value, property | staticmethod | classmethod):
            return kind.__name__, *map(of, (getattr(value, name, None) for name in ("fget", "fset", "__func__")))
        if method := getattr(value, "__dask_tokenize__", None):
            return of(method())
        if normalize_token.dispatch(kind) not in _OF_CONTAINERS:
            return tokenize(value, ensure_deterministic=True)
        return self._reduced(value, of)

    def _defined(self, thing: FunctionType | type) -> str:
        """Return a digest of a function or class that cannot be imported: of its code and what that reads."""
        if id(thing) in self._functions:
            return self._functions[id(thing)][1]
        if isinstance(thing, type):
            attributes = {name: value for name, value in vars(thing).items() if name not in _OF_A_CLASS}
            parts: Any = thing.__name__, thing.__bases__, attributes
        else:
            read = {name: thing.__globals__[name] for name in _globals(thing.__code__) if name in thing.__globals__}
            cells = [cell.cell_contents for cell in thing.__closure__ or ()]
            parts = thing.__code__, thing.__defaults__, thing.__kwdefaults__, cells, read, vars(thing)
        text = digest([repr(self.of(parts))])
        self._functions[id(thing)] = thing, text
        return text

    def _reduced(self, value: Any, of: Callable[[Any], Any]) -> Any:
        """Take an object apart as pickle does."""
        reduce = copyreg.dispatch_table.get(type(value))
        parts: Any = reduce(value) if reduce else value.__reduce_ex__(4)
        if isinstance(parts, str):
            return "global", getattr(value, "__module__", None), parts
        call, arguments, state, *more = [*list(parts), None]  # more: items of a list, and of a dict
        return "object", *map(of, (call, arguments, state, *(list(each or ()) for each in more)))


def digest(texts: Iterable[str]) -> str:
    """Return a digest of texts."""
    return hashlib.sha256("\n".join(texts).encode(errors="surrogatepass")).hexdigest()[:32]


def _imported(thing: Any) -> str:
    """Return the name by which each process imports a function or class; "" if it cannot."""
    named: Any = sys.modules.get(thing.__module__) if thing.__module__ != "__main__" else None
    for name in thing.__qualname__.split("."):
        named = getattr(named, name, None)
    return f"{thing.__module__}:{thing.__qualname__}" if named is thing else ""


def _globals(code: CodeType) -> set[str]:
    """Return the names of globals that code, and functions in it, read."""
    inner = [_globals(each) for each in code.co_consts if isinstance(each, CodeType)]
    return {str(i.argval) for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"}.union(*inner)
