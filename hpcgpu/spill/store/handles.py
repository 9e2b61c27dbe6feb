"""Handles for the event loop, and packed values for a peer.

A worker must neither copy on its event loop nor show handles to user code. So it

- reads its data for a task, and for ``get_data``, inside ``store.handing_out_handles(...)``;
- enters ``store.using(keys)`` in the task's thread, and replaces handles by the values that :meth:`Handle.resolve`
  returns;
- sends, in place of a handle, the value, or a call of :func:`arrive` with the packed value;
- calls :func:`keep_packed` and :func:`register` when it starts;
- sets ``store.on_fault``, and calls ``store.close()`` at its end.

``hpcgpu.spill.distributed.plugin`` does all this. Without it the store returns values everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from hpcgpu.spill.devices.device import Device
from hpcgpu.spill.values.containers import Skeleton
from hpcgpu.spill.values.take_apart import Slot, put_together
from hpcgpu.spill.values.unit import Entry

_mode: ContextVar[ReadMode | None] = ContextVar("hpcgpu-read-mode", default=None)
# Returns the read mode of this context; None: readers get values. Each read calls it, so it is no function in Python.
read_mode = _mode.get
_keep = False


class ReadMode(NamedTuple):
    """Readers in a context get handles. Immutable; GpuSpillBuffer makes it."""

    to_worker: bool  # the values are sent to a worker
    leaving: bool = False  # also for values that are up, but must be read in a thread to be sent


@contextmanager
def reading(mode: ReadMode | None) -> Iterator[None]:
    """Set the read mode while inside."""
    token = _mode.set(mode)
    try:
        yield
    finally:
        _mode.reset(token)


class Handle:
    """A stored value, to be resolved in a thread that may wait: a name of its entry, so the value lives as long."""

    __slots__ = ("entry", "reader")

    def __init__(self, reader: Any, entry: Entry) -> None:
        self.reader, self.entry = reader, entry  # a hpcgpu.spill.store.identity_map.Reader

    def __del__(self) -> None:
        self.reader.orphans.append(self.entry)  # no lock: the garbage collector may run this in a thread that holds it

    @property
    def nbytes(self) -> int:
        """Bytes of the value."""
        return self.entry.nbytes

    def resolve(self) -> Any:
        """Bring the value up, and return it; waits for copies."""
        return self.reader.restore(self.entry)

    def packed(self) -> Packed:
        """Return the value's bytes for a peer; no copy goes through the device; waits for copies."""
        return self.reader.packed(self.entry)

    def __reduce__(self) -> tuple[Callable[[Packed], Any], tuple[Packed]]:
        return Packed.unpack, (self.packed(),)


@dataclass(frozen=True, slots=True)
class Packed:
    """A value whose device buffers are host bytes, never written to: some are the store's own."""

    skeleton: Any  # the value with slots in place of its parts
    # for each slot: the index of the buffer and of its array, or None and the index in ``hosts``; and the part's type
    locations: tuple[tuple[int | None, int, type], ...]
    # of each buffer: its device (in another process: the device there), and the result of the device's ``pack``
    buffers: tuple[tuple[Device, np.ndarray, list[Any]], ...]
    hosts: tuple[Any, ...] = ()  # parts that are used in host memory

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum(root.nbytes for _, root, _ in self.buffers)

    @property
    def kind(self) -> type:
        """The type of the value."""
        if isinstance(self.skeleton, Skeleton):
            return self.skeleton.nodes[-1].kind
        return self.locations[0][2] if isinstance(self.skeleton, Slot) else type(self.skeleton)

    def unpack(self) -> Any:
        """Return the value, with its arrays on this process's device."""
        arrays = [device.unpack(root, views) for device, root, views in self.buffers]
        return put_together(self.skeleton, [self.hosts[i] if b is None else arrays[b][i] for b, i, _ in self.locations])


def keep_packed() -> None:
    """Let values from peers stay in host memory until their first use: the workers of this process have this store."""
    global _keep  # noqa: PLW0603 - unpickling has no other way to know where it runs
    _keep = True


def arrive(packed: Packed) -> Any:
    """Return a value from a peer, where it arrives: packed for this process's store, or unpacked in another process."""
    return packed if _keep else packed.unpack()
