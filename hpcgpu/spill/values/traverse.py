"""Takes the arrays out of a task's value, and puts them back in."""

from __future__ import annotations

import types
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from hpcgpu.errors import SpillError
from hpcgpu.spill.values.containers import SIMPLE, UNSET, Container, container_of

_ASIDE = frozenset({list, dict, set})  # never arrays themselves
_LEADS_ON = frozenset(
    {types.FunctionType, types.BuiltinMethodType, types.MethodWrapperType}
    | {weakref.ref, weakref.KeyedRef, weakref.WeakMethod}
)


class Slot(NamedTuple):
    """Stands for the ``number``-th object taken out of a value."""

    number: int


class Ref(NamedTuple):
    """Stands for a skeleton's ``number``-th node."""

    number: int


class Node(NamedTuple):
    """One object that leads to arrays."""

    kind: int  # the index of its class in the skeleton
    parts: tuple[Any, ...]  # slots, references, UNSET, or the value's own objects, not copied


class Skeleton(NamedTuple):
    """A value without its arrays: the objects that lead to arrays, each once, the value itself last."""

    # It is flat, and its nodes are not of the objects' classes. So no code of these classes runs when it is pickled (it
    # would find slots where it expects arrays), and Python does not run out of stack, however deep objects are nested.

    kinds: tuple[type, ...]
    nodes: tuple[Node, ...]


def take_apart(value: Any, is_array: Callable[[Any], bool]) -> tuple[Any, list[Any]]:
    """Return the skeleton of a value, and its arrays; the value itself is not changed.

    Looks into the objects that :mod:`hpcgpu.spill.values.containers` opens, to any depth, also in circles. Returns a
    value without arrays as it is. An object without arrays inside is not copied. An object stays closed if a closed
    object leads back to it (a closure, a weak reference): there would be two of it.
    """
    kind: type = type(value)
    if kind not in _ASIDE and is_array(value):
        return Slot(0), [value]
    if container_of(kind) is None:  # nearly all values: it pays not to traverse them
        return value, []
    closed: set[int] = set()
    while id(value) not in closed:
        graph = _Graph(value, is_array, closed)
        if not graph.numbers:
            break
        skeleton, others = graph.skeleton()
        if not others:
            return skeleton, graph.arrays
        closed |= others
    return value, []


def put_together(skeleton: Any, arrays: Sequence[Any]) -> Any:
    """Return the value that :func:`take_apart` took apart: a new one each time, with these arrays."""
    if type(skeleton) is Slot:
        return arrays[skeleton.number]
    if type(skeleton) is not Skeleton:
        return skeleton
    kinds = [_container_of(kind) for kind in skeleton.kinds]
    made = [kinds[node.kind].new() for node in skeleton.nodes]
    filled = [False] * len(made)
    todo: Sequence[int] = range(len(made))
    while todo:  # twice only where a tuple is in a circle
        for i in todo:
            parts = []
            for part in skeleton.nodes[i].parts:
                if type(part) is Ref:
                    inner = made[part.number]
                    if inner is UNSET:
                        break
                    parts.append(inner)
                else:
                    parts.append(arrays[part.number] if type(part) is Slot else part)
            else:
                made[i], filled[i] = kinds[skeleton.nodes[i].kind].filled(made[i], parts), True
        late = [i for i in todo if not filled[i]]
        if len(late) == len(todo):
            raise SpillError("a value of tuples that contain each other cannot be made again")
        todo = late
    return made[-1]


def is_data(skeleton: Any) -> bool:
    """Tell whether arrays lie in containers and records only, and in no object whose methods use them."""
    return type(skeleton) is not Skeleton or all(_container_of(kind).is_data for kind in skeleton.kinds)


def _container_of(kind: Any) -> Container:
    container = container_of(kind)
    if container is None:
        raise SpillError(f"an object of {kind.__module__}.{kind.__qualname__} cannot be made again from its contents")
    return container


class _Opened(NamedTuple):
    container: Container
    parts: list[Any]
    inside: list[int]  # ids of the parts that are arrays, or are opened


class _Graph:
    """The opened objects of a value, and its arrays."""

    def __init__(self, value: Any, is_array: Callable[[Any], bool], closed: set[int]) -> None:
        self.value = value
        self.arrays: list[Any] = []
        self.numbers: dict[int, int] = {}  # of the arrays, by their ids
        self._opened: dict[int, _Opened] = {}
        self._leads_on: list[Any] = []
        todo = [(value, _container_of(type(value)))]
        seen = {id(value)}
        for x, container in todo:
            parts = container.parts(x)
            if parts is None:
                continue
            inside: list[int] = []
            for part in parts:
                kind: type = type(part)
                if kind in SIMPLE:
                    continue
                key = id(part)
                if key not in seen:
                    if kind not in _ASIDE and is_array(part):
                        self.numbers[key] = len(self.arrays)
                        self.arrays.append(part)
                    elif (inner := container_of(kind)) is None or key in closed:
                        if kind in _LEADS_ON:
                            self._leads_on.append(part)
                        continue
                    else:
                        todo.append((part, inner))
                    seen.add(key)
                inside.append(key)
            if inside:
                self._opened[id(x)] = _Opened(container, parts, inside)
        self._objects = [x for x, _ in todo]  # keeps all objects alive while ids are used

    def skeleton(self) -> tuple[Skeleton, set[int]]:
        """Return the skeleton, and the ids of the objects that cannot be made again."""
        order = self._in_order(self._leading_to_arrays())
        marks: dict[int, Slot | Ref] = {key: Ref(i) for i, key in enumerate(order)}
        marks |= {key: Slot(number) for key, number in self.numbers.items()}
        kinds: dict[type, int] = {}
        nodes = []
        for key in order:
            container, parts, _ = self._opened[key]
            kind = kinds.setdefault(container.kind, len(kinds))
            nodes.append(Node(kind, tuple([marks.get(id(part), part) for part in parts])))
        made = Skeleton(tuple(kinds), tuple(nodes))
        back = {id(x) for part in self._leads_on for x in _behind(part) if type(marks.get(id(x))) is Ref}
        return made, back or _badly_hashed(made, order)

    def _leading_to_arrays(self) -> set[int]:
        users: dict[int, list[int]] = defaultdict(list)
        for key, opened in self._opened.items():
            for inner in opened.inside:
                users[inner].append(key)
        todo = list(self.numbers)
        leading: set[int] = set()
        for key in todo:
            new = [user for user in users.get(key, ()) if user not in leading]
            leading.update(new)
            todo += new
        # an object that is made again gets attributes of its own
        for x in self._objects:
            if id(x) in leading and (attributes := self._opened[id(x)].container.attributes_of(x)) is not None:
                leading.add(id(attributes))
                if id(attributes) not in self._opened:
                    container = _container_of(type(attributes))
                    self._opened[id(attributes)] = _Opened(container, container.parts(attributes) or [], [])
        return leading

    def _in_order(self, leading: set[int]) -> list[int]:
        """Return the objects, each after the objects in it, except in circles."""
        order: list[int] = []
        begun = {id(self.value)}
        stack = [(id(self.value), iter(self._opened[id(self.value)].inside))]
        while stack:
            key, inside = stack[-1]
            for inner in inside:
                if inner in leading and inner not in begun:
                    begun.add(inner)
                    stack.append((inner, iter(self._opened[inner].inside)))
                    break
            else:
                order.append(key)
                stack.pop()
        return order


class _Untouchable:
    """Stands for an array that must not be touched."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise TypeError

    def __getattribute__(self, name: str) -> Any:
        raise AttributeError(name)


def _badly_hashed(made: Skeleton, order: list[int]) -> set[int]:
    """Return the ids of objects that cannot be hashed again without their arrays: these may lie below by then."""
    hashed: set[int] = set()
    containers = [_container_of(kind) for kind in made.kinds]
    for i, node in enumerate(made.nodes):
        parts = containers[node.kind].hashed(node.parts)
        if SIMPLE.issuperset(map(type, parts)):
            continue
        hashed |= {order[p.number] for p in parts if type(p) is Ref} | {order[i] for p in parts if type(p) is Slot}
    if hashed:
        most = 1 + max(p.number for node in made.nodes for p in node.parts if type(p) is Slot)
        try:
            put_together(made, [_Untouchable()] * most)
        except Exception:  # of a class's __hash__
            return hashed
    return set()


def _behind(x: Any) -> Iterator[Any]:
    """Yield the objects to which a closed object leads."""
    kind: type = type(x)
    if kind is types.FunctionType:
        for cell in x.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # the cell is empty yet
                continue
    elif kind in (types.BuiltinMethodType, types.MethodWrapperType):
        yield x.__self__
    else:
        yield x()
