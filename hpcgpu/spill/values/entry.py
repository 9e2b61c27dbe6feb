"""One stored value: its parts, and the number of its names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpcgpu.spill.state.units import HOST
from hpcgpu.spill.values.traverse import Slot
from hpcgpu.spill.values.unit import Content, ObjectContent, SkeletonUnit, each_once

ABSENT = object()
# the skeleton of a value that is itself an array or a table
NO_SKELETON = SkeletonUnit(Slot(0), 0)


class Entry:
    """A value under one or more names: keys of the store, and handles.

    IdentityMap makes it, under the store's lock. ``value``, ``names`` and ``key`` change under that lock, and may be
    read without it; the other attributes never change.
    """

    __slots__ = (
        "__weakref__",
        "key",
        "lazy",
        "locations",
        "names",
        "skeleton",
        "small",
        "units",
        "used_units",
        "value",
    )

    def __init__(
        self, value: Any, skeleton: SkeletonUnit, locations: Sequence[tuple[ObjectContent, int]], lazy: bool = False
    ) -> None:
        self.value = value  # the value itself, if it was stored or read and its used units are still up; else ABSENT
        self.skeleton, self.locations = skeleton, locations  # without its parts; the unit and position of each part
        self.lazy = lazy  # parts come up one by one, at first use (jit_unspill): readers get proxies for them
        self.names, self.key = 0, ABSENT  # the number of keys and handles; the last key, for messages
        self.units: tuple[Content, ...]  # the units that move, each once: the parts, or their bundles
        self.small: tuple[ObjectContent, ...] = ()  # the parts that are in bundles
        if skeleton is NO_SKELETON or not locations:
            only = skeleton if skeleton is not NO_SKELETON else locations[0][0]
            self.units = (only.bundle or only,)
            if only.bundle is not None:
                self.small = (only,)
        else:
            parts = skeleton, *each_once(locations)
            self.units = tuple(dict.fromkeys(part.unit for part in parts))
            self.small = tuple(part for part in parts if part.bundle is not None)
        self.used_units = (skeleton,) if lazy else self.units  # the units that come up with the value

    @property
    def is_plain(self) -> bool:
        """Whether the value has no parts on a device, and readers get no proxies."""
        return not self.lazy and all(unit.top == HOST for unit in self.units)

    @property
    def nbytes(self) -> int:
        """Bytes of all parts, in any tier."""
        return self.skeleton.nbytes + sum(part.nbytes for part in each_once(self.locations))
