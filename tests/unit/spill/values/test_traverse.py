"""Device arrays are found in any container; it comes back as it was: same classes, same identities, no code run."""

import asyncio
import enum
import pickle
import threading
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcgpu.errors import SpillError
from hpcgpu.spill.values.containers import contents, is_data
from hpcgpu.spill.values.take_apart import put_together, take_apart

METHODS = """
__new__ __init__ __setattr__ __getattr__ __copy__ __deepcopy__ __getstate__ __setstate__ __eq__ __hash__ __iter__
__len__ __bool__ __contains__ __getitem__ __setitem__ append extend keys values items update
"""
Old = namedtuple("Old", "left right")  # noqa: PYI024
T = TypeVar("T")


class Array:
    """Stands for a device array; it cannot be hashed, as they cannot."""

    __hash__ = None  # type: ignore[assignment]
    __slots__ = ("n",)

    def __init__(self, n: int) -> None:
        self.n = n

    def __reduce__(self) -> Any:
        raise TypeError("an array of the device, pickled")


def is_array(x: Any) -> bool:
    return type(x) is Array


class Plain:
    a: Any
    other: Any

    def __init__(self, tag: Any, **more: Any) -> None:
        self.tag = tag
        self.__dict__.update(more)


class Slotted:
    __slots__ = ("__private", "left", "never")

    def __init__(self, left: Any, right: Any) -> None:
        self.left, self.__private = left, right


class Mixed(Slotted):
    __slots__ = ("__dict__",)


class Below(Slotted):
    __slots__ = ("__dict__", "left")  # hides the one above, which pickle does not see

    def __init__(self, left: Any, right: Any) -> None:
        super().__init__(left, right)
        vars(Slotted)["left"].__set__(self, right)
        self.more = right


def refused(*_: Any) -> Any:
    raise AssertionError("code of a user's class is run")


GUARDED: list[Any] = [
    type(f"Guarded_{base.__name__}", (base,), {**dict.fromkeys(METHODS.split(), refused), "__module__": __name__})
    for base in (object, list, dict, tuple, set, deque, OrderedDict)
]
globals().update((kind.__name__, kind) for kind in GUARDED)  # where pickle looks for them


@dataclass(frozen=True)
class Frozen:
    left: Any
    right: Any = field(hash=False)


@dataclass(frozen=True, slots=True)
class FrozenSlots:
    left: Any
    right: Any


class Record(NamedTuple):
    left: Any
    right: Any


class Boxed(Generic[T]):
    def __init__(self, x: T) -> None:
        self.x = x

    def method(self) -> T:
        return self.x


class MyList(list[Any]):
    pass


class MyDict(dict[Any, Any]):
    pass


class MyOrdered(OrderedDict[Any, Any]):
    pass


class MyTuple(tuple[Any, ...]):
    pass


class MySet(set[Any]):
    pass


class MyDeque(deque[Any]):
    def __init__(self) -> None:
        raise AssertionError


def with_attribute(x: Any, y: Any) -> Any:
    x.attribute = y
    return x


def guarded(x: Any) -> list[Any]:
    """Return objects of classes that run into an error, whatever of them is run."""
    plain, some, names, whole, several, row, ordered = GUARDED
    out = [object.__new__(plain), list.__new__(some), dict.__new__(names), tuple.__new__(whole, (x,))]
    out += [set.__new__(several), deque.__new__(row), dict.__new__(ordered)]
    for guard in out:
        object.__setattr__(guard, "x", x)
    list.append(out[1], x)
    dict.__setitem__(out[2], "x", x)
    set.add(out[4], 5)
    deque.append(out[5], x)
    OrderedDict.__setitem__(out[6], "x", x)
    return out


CASES: dict[str, Callable[[Any], Any]] = {
    "list": lambda a: [1, a, "x", a],
    "tuple": lambda a: (a, [a], ()),
    "dict": lambda a: {"a": a, 1: {"b": [a]}},
    "OrderedDict": lambda a: OrderedDict(b=a, a=1),
    "defaultdict": lambda a: defaultdict(list, a=[a]),
    "Counter": lambda a: Counter(a=3, b=a),
    "deque": lambda a: deque([1, a], maxlen=2),
    "set": lambda a: {1, Plain("x", a=a)},
    "frozenset": lambda a: frozenset([Plain("x", a=a), 1]),
    "key": lambda a: {Plain("x", a=a): 1, (2, Plain("y", a=a)): a},
    "hash of its own": lambda a: {Frozen("x", a)},
    "hash of the array": lambda a: {Hashed(1, a=a)},
    "key with a hash of the array": lambda a: {(1, Hashed(1, a=a)): 5},
    "object": lambda a: Plain(1, a=a, b={"c": a}),
    "slots": lambda a: Slotted(1, a),
    "slots below": lambda a: Below(a, [a]),
    "generic": lambda a: Boxed([a]),
    "dataclass": lambda a: Frozen(a, [a]),
    "dataclass with slots": lambda a: FrozenSlots(1, a),
    "named tuple": lambda a: Record(a, Old(1, a)),
    "list subclass": lambda a: with_attribute(MyList([1, a]), 5),
    "attribute of a list": lambda a: with_attribute(MyList([1]), a),
    "dict subclass": lambda a: with_attribute(MyDict(x=a), [a]),
    "OrderedDict subclass": lambda a: with_attribute(MyOrdered(x=a), [a]),
    "attribute of an OrderedDict": lambda a: with_attribute(OrderedDict(x=1), a),
    "tuple subclass": lambda a: with_attribute(MyTuple([1, a]), [a]),
    "set subclass": lambda a: with_attribute(MySet([1]), a),
    "deque subclass": lambda a: with_attribute(deque.__new__(MyDeque), a),
    "namespace": lambda a: types.SimpleNamespace(a=a, b=2),
    "partial": lambda a: with_attribute(partial(max, a, key=[a]), a),
    "bound method": lambda a: Boxed(a).method,
    "nothing of it is run": guarded,
}


def held_by(x: Any) -> list[Any]:
    """Return what an object holds, without the code that is tested: in an order that is the same for one like it."""
    kind, out = type(x), list[Any]()
    if isinstance(x, dict):
        order = OrderedDict.items(x) if isinstance(x, OrderedDict) else dict.items(x)
        out += [part for item in order for part in item]
    elif isinstance(x, (set, frozenset)):
        items: Any = set.__iter__(x) if isinstance(x, set) else frozenset.__iter__(x)
        out += sorted(items, key=lambda m: str(getattr(m, "tag", m)))
    rows: list[Any] = [list, tuple, deque]
    out += [part for base in rows if isinstance(x, base) for part in base.__iter__(x)]
    if isinstance(x, deque):
        out.append(x.maxlen)
    if isinstance(x, defaultdict):
        out.append(x.default_factory)
    if isinstance(x, types.MethodType):
        out += [x.__func__, x.__self__]
    if isinstance(x, partial):
        out += [x.func, x.args, x.keywords]
    for base in kind.__mro__:
        if base.__module__ == __name__:
            slots = [s for s in vars(base).values() if type(s) is types.MemberDescriptorType]
            out += [s.__get__(x) for s in slots if kind is not Array and hasattr(x, s.__name__)]
    if kind.__dictoffset__ or kind is types.SimpleNamespace:
        out.append({**object.__getattribute__(x, "__dict__")})
    return out


def picture(x: Any) -> list[Any]:
    """Return all classes, values and identities in a value: those like it have the same picture."""
    numbers: dict[int, int] = {}
    out, todo, kept = list[Any](), [x], list[Any]()
    for y in todo:
        kept.append(y)
        if type(y) in (int, str, type(None)) or isinstance(y, (type, types.FunctionType, types.BuiltinMethodType)):
            out.append(y)
            continue
        if id(y) in numbers:
            out.append(("again", numbers[id(y)]))
            continue
        numbers[id(y)] = len(numbers)
        parts = held_by(y)
        out.append((type(y), len(parts), id(y) if type(y) is Array else None))
        todo += parts
    return out


def ids(x: Any) -> list[int]:
    """Return the ids of all that is in a value, to see that it is what it was."""
    seen, todo = dict[int, Any](), [x]
    for y in todo:
        if id(y) not in seen:
            seen[id(y)] = y
            todo += [p for p in held_by(y) if type(p) is not dict or p]
    return [id(y) for y in seen.values() if type(y) is not dict]


def check(value: Any, arrays: int) -> Any:
    """Take a value apart and put it together; return what came of it."""
    before, there = picture(value), ids(value)
    rest, found = take_apart(value, is_array)
    assert [type(x) for x in found] == [Array] * len(found)
    assert len(found) == arrays
    again = put_together(rest, found)
    assert picture(again) == before
    assert again is not value
    sent = put_together(pickle.loads(pickle.dumps(rest)), found)
    assert picture(sent) == before
    assert (picture(value), ids(value)) == (before, there)
    assert picture(put_together(rest, found)) == before  # and as often as one likes
    return again


@pytest.mark.parametrize("name", CASES)
def test_what_is_found_and_comes_back(name: str) -> None:
    check(CASES[name](Array(1)), 1)


@pytest.mark.parametrize("name", CASES)
def test_without_arrays_it_is_the_same_object(name: str) -> None:
    value = CASES[name]([5])
    assert take_apart(value, is_array) == (value, []) or name in ("bound method", "partial")
    assert take_apart(value, is_array)[0] is value


def test_what_is_like_it_is_another_object() -> None:
    inner = [5]
    value = Plain("x", a=Array(1), inner=inner)
    again = check(value, 1)
    assert again.inner is inner  # no array is in it
    again.new = 1
    assert not hasattr(value, "new")


def test_a_limit_is_kept_and_a_factory() -> None:
    again = check([deque([Array(1), 1], 2), defaultdict(list, a=Array(2))], 2)
    again[0].append(5)
    again[1]["new"].append(1)
    assert (len(again[0]), again[1]["new"]) == (2, [1])


def test_dict_that_is_its_attributes_stays_so() -> None:
    value = MyDict(x=Array(1))
    value.__dict__ = value
    again = put_together(*take_apart(value, is_array))
    again.more = 5
    assert (again["more"], list(value)) == (5, ["x"])


class Grid:
    """A class that hpcgpu opens by a registered function only."""

    def __init__(self, cells: Any, halo: Any) -> None:
        self.cells, self.halo = cells, halo

    def __del__(self) -> None:
        pass


contents.register(Grid, lambda grid: (Grid, (grid.cells, grid.halo)) if grid.halo else None)


def test_registered_class_is_opened_and_made_again() -> None:
    value = [Grid([Array(1)], 2)]
    again = check(value, 1)
    assert type(again[0]) is Grid
    assert not is_data(take_apart(value, is_array)[0])


def test_registered_function_keeps_an_object_closed() -> None:
    value = [Grid([Array(1)], 0)]
    assert take_apart(value, is_array) == (value, [])


def test_registered_object_in_a_circle_with_itself_stays_closed() -> None:
    value = Grid([Array(1)], 2)
    value.halo = value
    assert take_apart(value, is_array) == (value, [])


def test_hash_that_a_circle_makes_impossible_stays_closed() -> None:
    value = Hashed(1, a=Array(1))
    value.group = frozenset([value])
    assert take_apart(value, is_array) == (value, [])


def test_attributes_are_its_own_also_where_no_array_is_in_them() -> None:
    value = with_attribute(MyList([Array(1)]), 5)
    again = check(value, 1)
    again.attribute = 6
    assert value.attribute == 5


KINDS: list[Callable[[], Any]] = [list, dict, OrderedDict, lambda: Plain(1), lambda: Mixed(0, 0), MyList, deque, tuple]


@given(st.lists(st.tuples(st.sampled_from(range(len(KINDS))), st.lists(st.integers(0, 12), max_size=4)), min_size=1))
def test_any_graph_comes_back(plan: list[tuple[int, list[int]]]) -> None:
    """Objects of many kinds, each holding any others: shared, in circles, in tuples; array 0 to 3 among them."""
    arrays = [Array(n) for n in range(4)]
    objects: list[Any] = [*arrays]
    for kind, _ in plan:
        objects.append(KINDS[kind]())
    for i, (_, inside) in enumerate(plan):
        x, parts = objects[4 + i], [objects[n % len(objects)] for n in inside]
        if isinstance(x, tuple):
            x = objects[4 + i] = tuple(parts)  # of those there were
        elif isinstance(x, (list, deque)):
            x.extend(parts)
        elif isinstance(x, dict):
            x.update(enumerate(parts))
        else:
            x.__dict__.update((f"a{n}", part) for n, part in enumerate(parts))
    value = objects[-1]
    before, there = picture(value), ids(value)
    rest, found = take_apart(value, is_array)
    assert sorted(map(id, found)) == sorted(i for i in there if i in set(map(id, arrays)))
    assert (rest is value) == (not found)
    assert picture(put_together(rest, found)) == before
    if found:
        assert picture(put_together(pickle.loads(pickle.dumps(rest)), found)) == before
    assert (picture(value), ids(value)) == (before, there)


@pytest.mark.parametrize("entered_by", ["tuple", "list", "object"])
def test_circles(entered_by: str) -> None:
    some: list[Any] = [Array(1)]
    whole = (some, MyTuple([some]))
    some += [whole, (whole,)]
    plain = Plain("x", whole=whole)
    some.append(plain)
    check({"tuple": whole, "list": some, "object": plain}[entered_by], 1)


def test_depth() -> None:
    """Python's own ways to copy and to pickle run out of stack at a thousand."""
    value: Any = Array(1)
    for n in range(8_000):
        value = [value] if n % 2 else Plain(n, inner=value)
    check(value, 1)


class Live(Plain):
    """Cannot be pickled, whatever it holds."""


class Ended(Plain):
    def __del__(self) -> None:
        pass


class Colour(enum.Enum):
    RED = Plain(1, a=Array(7))


class Reduced(Plain):
    def __reduce__(self) -> Any:
        return "THE_ONLY_ONE"


class Hashed(Plain):
    def __hash__(self) -> int:
        return hash(getattr(self.a, "n", 0))


def generator(x: Any) -> Any:
    yield x


def with_closure(x: Any) -> Any:
    x.callback = lambda: x
    return x


def with_own_method(x: list[Any]) -> Any:
    x.append(x.append)
    return x


def with_weak_child(x: Any) -> Any:
    x.child = Plain("child", parent=weakref.ref(x))
    return x


CLOSED: dict[str, Callable[[Any], Any]] = {
    "generator": generator,
    "class": lambda a: type("Holder", (), {"a": a}),
    "function": lambda a: lambda: a,
    "module": lambda a: with_attribute(types.ModuleType("m"), a),
    "lock": lambda a: Live(1, a=a, lock=threading.Lock()),
    "event": lambda a: Live(1, a=a, stop=threading.Event()),
    "thread": lambda a: with_attribute(threading.Thread(), a),
    "loop": lambda a: with_attribute(asyncio.Queue(), a),
    "finalizer": lambda a: Ended(1, a=a),
    "enum": lambda _: Colour.RED,
    "reduced": lambda a: Reduced(1, a=a),
    "exception": lambda a: with_attribute(ValueError("x"), a),
    "closure": lambda a: with_closure(Plain(1, a=a)),
    "weak child": lambda a: with_weak_child(Plain(1, a=a)),
    "its own append": lambda a: with_own_method([a]),
}


@pytest.mark.parametrize("name", CLOSED)
def test_what_cannot_be_made_again_stays_as_it_is(name: str) -> None:
    array = Array(1)
    closed = CLOSED[name](array)
    assert take_apart(closed, is_array)[0] is closed
    value = Plain("x", closed=[closed], other=[array])
    rest, found = take_apart(value, is_array)
    assert found == [array]
    again = put_together(rest, found)
    assert again.closed[0] is closed
    assert again.other == [array]
    assert again.other is not value.other


def test_who_is_asked() -> None:
    """Numbers and texts are not: most of what there is."""
    asked: list[Any] = []
    take_apart([1, "x", (2.5, None), Plain(b"y")], lambda x: asked.append(type(x)) or False)  # type: ignore[func-returns-value]
    assert sorted({kind.__name__ for kind in asked}) == ["Plain", "tuple"]


def test_a_class_that_changed_is_an_error_in_words() -> None:
    rest, found = take_apart(Plain(1, a=Array(1)), is_array)
    other = rest._replace(nodes=[n._replace(kind=threading.Thread) if n.kind is Plain else n for n in rest.nodes])
    with pytest.raises(SpillError, match=r"threading\.Thread cannot be made"):
        put_together(other, found)


@pytest.mark.parametrize(
    ("name", "data"),
    [("list", True), ("partial", True), ("dataclass", True), ("namespace", True), ("object", False), ("slots", False)],
)
def test_objects_whose_methods_use_arrays(name: str, data: bool) -> None:
    rest, _ = take_apart([CASES[name](Array(1)), 5], is_array)
    assert is_data(rest) == data
    assert is_data(5)
