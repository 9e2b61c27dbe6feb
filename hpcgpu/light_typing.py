"""NamedTuple and TYPE_CHECKING without typing, for what each rank imports; a type checker sees typing's own.

Importing typing takes 3 CPU ms, and each of its named tuples 0.2: it compiles the annotation of each field, and a
constructor. A rank that is only bound has 25 of them.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any
    from typing import NamedTuple as NamedTuple
else:
    from _collections import _tuplegetter as field_of  # of collections.namedtuple; a property takes 6 times as long

    class _Fields(type):
        """Makes a field of each annotation in a class statement."""

        def __new__(cls, name: str, bases: tuple[type, ...], space: dict[str, Any]) -> type:
            fields = tuple(space.get("__annotations__", ()))
            defaults = {field: space.pop(field) for field in fields if field in space}
            getters = {field: field_of(i, None) for i, field in enumerate(fields)}
            facts = {"__slots__": (), "__match_args__": fields, "_fields": fields, "_field_defaults": defaults}
            return super().__new__(cls, name, bases, {**space, **getters, **facts})

    class NamedTuple(tuple, metaclass=_Fields):
        """The base in a class statement, as typing's; only help() shows no signature."""

        def __new__(cls, *values: Any, **named: Any) -> NamedTuple:  # noqa: D102
            fields, defaults = cls._fields, cls._field_defaults
            if len(values) < len(fields):
                try:
                    values += tuple([named.pop(f) if f in named else defaults[f] for f in fields[len(values) :]])
                except KeyError as e:
                    raise TypeError(f"{cls.__name__} lacks its field {e}") from None
            if named or len(values) > len(fields):
                raise TypeError(f"{cls.__name__} has the fields {', '.join(fields)}, each once")
            return tuple.__new__(cls, values)

        def __getnewargs__(self) -> tuple[Any, ...]:
            return tuple(self)

        def __repr__(self) -> str:
            pairs = zip(self._fields, self, strict=True)
            return f"{type(self).__name__}({', '.join(f'{field}={value!r}' for field, value in pairs)})"

        def _replace(self, **changes: Any) -> NamedTuple:
            changed = tuple.__new__(type(self), map(changes.pop, self._fields, self))
            return changed if not changes else type(self)(*changed, **changes)  # which raises TypeError

        def _asdict(self) -> dict[str, Any]:
            return dict(zip(self._fields, self, strict=True))
