"""Values that a thread must read: handles on the event loop, and packed values on their way to a peer.

A worker must neither copy on its event loop nor show handles to user code. For that it

- reads its data for a task, and for ``get_data``, inside ``store.handing_out_handles(...)``;
- enters ``store.using(keys)`` in the task's thread, and replaces handles by what :meth:`Handle.resolve` returns;
- sends, in place of a handle, what it brings up, or a call of :func:`arrive` with what it packs;
- calls :func:`keep_packed`, and ``hpcgpu.spill.store.dask.register``, when it starts;
- sets ``store.on_fault``, and calls ``store.close()`` at its end.

``hpcgpu.deploy.processes.worker_plugin`` does all this. Without it the store returns values themselves everywhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from hpcgpu.spill.devices.protocols import Device
from hpcgpu.spill.values.entry import Entry
from hpcgpu.spill.values.traverse import put_together


class EntryReader(Protocol):
    """Brings values up; :class:`hpcgpu.spill.store.reader.Reader` does.

    Thread-safe: handles call it in any thread. Methods that return a value or its bytes wait for copies.
    """

    @property
    def orphans(self) -> deque[Any]:
        """Takes the entries of handles that go."""

    def restore(self, entry: Entry) -> Any:
        """Bring a value up, and return it."""

    def packed(self, entry: Entry) -> Packed:
        """Return a value's bytes for a peer."""


class Handle:
    """A stored value, to be resolved in a thread that may wait: a name of its entry, so that it lives as long.

    Thread-safe, since it never changes. Reader makes it under the store's lock; a task resolves it in its own thread;
    any thread may drop the last reference.
    """

    __slots__ = ("entry", "reader")

    def __init__(self, reader: EntryReader, entry: Entry) -> None:
        self.reader, self.entry = reader, entry

    def __del__(self) -> None:
        # no lock here: the garbage collector may run this in a thread that holds it
        self.reader.orphans.append(self.entry)

    @property
    def nbytes(self) -> int:
        """Bytes of the value."""
        return self.entry.nbytes

    def resolve(self) -> Any:
        """Bring the value up, and return it."""
        return self.reader.restore(self.entry)

    def packed(self) -> Packed:
        """Return the value's bytes for a peer; nothing goes through the device."""
        return self.reader.packed(self.entry)

    def __reduce__(self) -> tuple[Callable[[Packed], Any], tuple[Packed]]:
        return Packed.unpack, (self.packed(),)


@dataclass(frozen=True, slots=True)
class Packed:
    """A value whose device buffers are host bytes.

    Immutable, and nobody writes to the bytes: some are the store's own. Reader makes it, in a thread that may wait. At
    the peer IdentityMap traverses it, or it is unpacked at once.
    """

    skeleton: Any  # the value with slots in place of its parts
    # for each slot: the index of the buffer and of its array, or None and the index in ``hosts``; and the part's type
    locations: tuple[tuple[int | None, int, type], ...]
    # of each: its device (in another process: the device there), and what the device's ``pack`` returns
    buffers: tuple[tuple[Device, np.ndarray, list[Any]], ...]
    hosts: tuple[Any, ...] = ()  # parts that are used in host memory

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum(root.nbytes for _, root, _ in self.buffers)

    def unpack(self) -> Any:
        """Return the value, with its arrays on this process's device."""
        arrays = [device.unpack(root, views) for device, root, views in self.buffers]
        return put_together(self.skeleton, [self.hosts[i] if b is None else arrays[b][i] for b, i, _ in self.locations])


_keep = False


def keep_packed() -> None:
    """Let values from peers stay in host memory until their first use: the workers of this process have this store."""
    global _keep  # noqa: PLW0603 - unpickling has no other way to know where it runs
    _keep = True


def arrive(packed: Packed) -> Any:
    """Return a value from a peer, where it arrives: packed for this process's store, or, in another process, itself."""
    return packed if _keep else packed.unpack()
