"""The content of the store: arrays are taken out of the values of tasks, and put back in."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from hpcgpu.errors import SpillError
from hpcgpu.spill.values.containers import SIMPLE, Node, Skeleton, Unset, maker_of, opener_of

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


def take_apart(value: Any, is_array: Callable[[Any], bool]) -> tuple[Any, list[Any]]:
    """Return the skeleton of a value, and its arrays; the value itself is not changed.

    Looks into the objects that :mod:`hpcgpu.spill.values.containers` opens, to any depth, also in circles. Returns a
    value without arrays as it is. An object without arrays inside is not copied. An object stays closed if a closed
    object leads back to it (a closure, a weak reference): there would be two of it.
    """
    kind: type = type(value)
    if kind not in _ASIDE and is_array(value):
        return Slot(0), [value]
    if opener_of(kind) is None:  # nearly all values: it pays not to traverse them
        return value, []
    closed: set[int] = set()
    while id(value) not in closed:
        graph = _Graph(value, is_array, closed)
        if not graph.numbers:
            break
        skeleton = graph.skeleton()
        if more := graph.led_back_to():
            closed |= more
        elif graph.circles and not _can_be_made(skeleton, graph.arrays):
            break
        else:
            return skeleton, graph.arrays
    return value, []


def put_together(skeleton: Any, arrays: Sequence[Any]) -> Any:
    """Return the value that :func:`take_apart` took apart: a new one each time, with these arrays."""
    if type(skeleton) is Slot:
        return arrays[skeleton.number]
    if type(skeleton) is not Skeleton:
        return skeleton
    makers = [maker_of(node.kind) for node in skeleton.nodes]
    made = [maker.new() for maker in makers]
    todo: Sequence[int] = range(len(made))
    while todo:  # twice only where a tuple is in a circle
        late = []
        for i in todo:
            node, parts = skeleton.nodes[i], []
            for part in node.parts:
                if type(part) is Ref:
                    inner = made[part.number]
                    if inner is Unset:
                        late.append(i)
                        break
                    parts.append(inner)
                else:
                    parts.append(arrays[part.number] if type(part) is Slot else part)
            else:
                made[i] = makers[i].filled(made[i], node.names, parts)
        if len(late) == len(todo):
            raise SpillError("a value of tuples that contain each other cannot be made again")
        todo = late
    return made[-1]


def _can_be_made(skeleton: Skeleton, arrays: Sequence[Any]) -> bool:
    """Try to make a value of circles: a hash may need attributes that are set later, or a function all parts."""
    try:
        put_together(skeleton, arrays)
    except Exception:  # of a user's __hash__
        return False
    return True


class _Graph:
    """The opened objects of a value, and its arrays."""

    def __init__(self, value: Any, is_array: Callable[[Any], bool], closed: set[int]) -> None:
        self.arrays: list[Any] = []
        self.numbers: dict[int, int] = {}  # of the arrays, by their ids
        self.circles = False
        # with ids of parts that are arrays, or are opened; each object after the objects in it, except in circles
        self._opened: dict[int, tuple[Node, list[int]]] = {}
        self._leads_on: list[Any] = []
        self._marks: dict[int, Slot | Ref] = {}
        begun = {id(value)}
        top = self._open(value, closed)
        stack = [(id(value), top, iter(top.parts), list[int]())] if top else []
        while stack:
            this, opened, parts, inside = stack[-1]
            for part in parts:
                kind: type = type(part)
                if kind in SIMPLE:
                    continue
                key = id(part)
                if key in begun or key in self.numbers:
                    inside.append(key)
                    self.circles |= key not in self.numbers and key not in self._opened
                elif kind not in _ASIDE and is_array(part):
                    self.numbers[key] = len(self.arrays)
                    self.arrays.append(part)
                    inside.append(key)
                elif inner := self._open(part, closed):
                    begun.add(key)
                    inside.append(key)
                    stack.append((key, inner, iter(inner.parts), []))
                    break
            else:
                self._opened[this] = opened, inside
                stack.pop()

    def _open(self, x: Any, closed: set[int]) -> Node | None:
        """Return the opened object; None if it stays closed."""
        kind: type = type(x)
        opener = opener_of(kind)
        if opener is None or id(x) in closed:
            if kind in _LEADS_ON:
                self._leads_on.append(x)
            return None
        return opener(x)

    def skeleton(self) -> Skeleton:
        """Return the skeleton of a value with arrays."""
        leading = set(self.numbers)
        before = 0
        while len(leading) > before:  # more than twice only where objects are in circles
            before = len(leading)
            leading.update(key for key, (_, inside) in self._opened.items() if not leading.isdisjoint(inside))
        order = [key for key in self._opened if key in leading]
        self._marks = {key: Ref(i) for i, key in enumerate(order)}
        self._marks |= {key: Slot(number) for key, number in self.numbers.items()}
        nodes = []
        for key in order:
            node, _ = self._opened[key]
            nodes.append(node._replace(parts=tuple([self._marks.get(id(part), part) for part in node.parts])))
        return Skeleton(tuple(nodes))

    def led_back_to(self) -> set[int]:
        """Return the ids of the objects in the skeleton to which a closed object leads."""
        return {id(x) for part in self._leads_on for x in _behind(part) if type(self._marks.get(id(x))) is Ref}


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
