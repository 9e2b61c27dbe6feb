"""What stands for a value that is not up: on the event loop, and on its way to a peer.

A worker that shall neither copy on its event loop nor show handles to user code (it is done in
``hpcgpu.deploy.processes.worker_plugin``):

- reads its data for a task, and for ``get_data``, inside ``store.handing_out_handles(...)``;
- in the task's thread enters ``store.using(keys)`` and then replaces handles by what :meth:`Handle.resolve` returns;
- calls :func:`keep_packed`, and ``hpcgpu.spill.store.dask.register``, when it starts;
- sets ``store.on_fault`` and calls ``store.close()`` at its end.

Without all this the store hands out values themselves everywhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from hpcgpu.spill.devices.protocols import Device
from hpcgpu.spill.values.entry import Entry
from hpcgpu.spill.values.value import put_together


class Reads(Protocol):
    """What brings values up; :class:`hpcgpu.spill.store.keeper.Keeper` does.

    Thread-safe: handles call it in any thread. What returns a value or its bytes waits for copies.
    """

    @property
    def orphans(self) -> deque[Any]:
        """Takes the entries whose handles are gone."""

    def restore(self, entry: Entry) -> Any:  # noqa: ANN401
        """Return a value, brought up."""

    def packed(self, entry: Entry) -> Packed:
        """Return a value's bytes for a peer."""


class Handle:
    """A stored value, to be resolved in a thread that may wait.

    ``for_store`` says that, pickled, it goes to a worker, whose store may keep the bytes as they are.

    It is a name of the entry: the value is there as long as the handle is, whatever becomes of the keys.

    Thread-safe, since it never changes. Keeper makes it under the store's lock, for a reader that takes handles; a task
    resolves it in its own thread; any thread may let it go.
    """

    __slots__ = ("entry", "for_store", "keeper")

    def __init__(self, keeper: Reads, entry: Entry, for_store: bool) -> None:
        self.keeper, self.entry, self.for_store = keeper, entry, for_store

    def __del__(self) -> None:
        # no lock here: the garbage collector may run this in a thread that holds it
        self.keeper.orphans.append(self.entry)

    @property
    def nbytes(self) -> int:
        """Bytes of the value."""
        return self.entry.nbytes

    def resolve(self) -> Any:  # noqa: ANN401
        """Return the value, brought up."""
        return self.keeper.restore(self.entry)

    def packed(self) -> Packed:
        """Return the value's bytes for a peer; nothing goes through the device."""
        return self.keeper.packed(self.entry)

    def __reduce__(self) -> tuple[Callable[[Packed, bool], Any], tuple[Packed, bool]]:
        return _arrive, (self.packed(), self.for_store)


@dataclass(frozen=True, slots=True)
class Packed:
    """A value whose device buffers are host bytes.

    Immutable, and nobody writes to the bytes: some are the store's own. Keeper makes it, in a thread that may wait; in
    the peer Catalog takes it apart, or it is unpacked at once.

    Attributes
    ----------
    rest : object
        The value with slots in place of its parts.
    places : tuple of (int or None, int, type)
        For each slot: which buffer, and which of its arrays; or None, and which of ``hosts``; and the part's type.
    buffers : tuple of (Device, ndarray, list)
        Device (in another process: the one there), bytes (shape (nbytes,), dtype uint8, perhaps page-locked), and how
        the arrays lie in them, as :meth:`hpcgpu.spill.devices.protocols.Device.pack` returns it.
    hosts : tuple
        Parts that are in host memory anyway.

    """

    rest: Any
    places: tuple[tuple[int | None, int, type], ...]
    buffers: tuple[tuple[Device, np.ndarray, list[Any]], ...]
    hosts: tuple[Any, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum(root.nbytes for _, root, _ in self.buffers)

    def unpack(self) -> Any:  # noqa: ANN401
        """Return the value, with its arrays on this process's device."""
        arrays = [device.unpack(root, views) for device, root, views in self.buffers]
        return put_together(self.rest, [self.hosts[i] if b is None else arrays[b][i] for b, i, _ in self.places])


_keep = False


def keep_packed() -> None:
    """Let what is sent to workers of this process stay in host memory until it is used: they have this store."""
    global _keep  # noqa: PLW0603 - unpickling has no other way to know where it runs
    _keep = True


def _arrive(packed: Packed, for_store: bool) -> Any:  # noqa: ANN401
    # what a task gathers with a client of its own comes to a worker's process, too, but not to its store
    return packed if for_store and _keep else packed.unpack()
