"""The store: a mapping whose values live on the device, in host memory or on disk.

``in``, ``len``, ``iter``, ``keys`` and ``del`` move nothing. Setting is bookkeeping; a thread moves down what
is above a limit. Reading brings back what was moved, in the thread that reads. Only inside
:meth:`GpuSpillBuffer.handing_out_handles`, which distributed's event loop uses, is what is not up handed out as a
:class:`Handle`, to be resolved where waiting is allowed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

from hpcgpu.errors import SpillError
from hpcgpu.spill import places
from hpcgpu.spill.disk import Disk
from hpcgpu.spill.entry import ABSENT, Entry
from hpcgpu.spill.handle import Handle, Packed
from hpcgpu.spill.keeper import Keeper
from hpcgpu.spill.limits import read_limit, size_of
from hpcgpu.spill.mover import Mover
from hpcgpu.spill.moves import Count, Moves
from hpcgpu.spill.reading import Reader, reader, reading
from hpcgpu.spill.slabs import Slabs

logger = logging.getLogger("distributed.worker.memory")
_HINT = (
    "values are brought up on the event loop, and the worker answers nobody meanwhile: "
    "--preload hpcgpu.deploy.preload makes moves asynchronous"
)
_SLABS_BYTES = 1 << 30  # where the host tier has no limit
TARGET = 0.6  # distributed.yaml, worker.memory.target


class Spilled(NamedTuple):
    """What distributed reports as spilled.

    Attributes
    ----------
    memory : int
        Bytes of the values that are not in the process's memory: on the device, or on disk.
    disk : int
        Bytes below the tier in which they are used; with 0 the dashboard would show nothing (facts/spill.md 3.6).

    """

    memory: int
    disk: int


class GpuSpillBuffer(MutableMapping[Any, Any]):
    """Keys to values, device → host → disk.

    Parameters
    ----------
    device_memory_limit : int, float or str
        Where moving from the device to the host begins: bytes, ``"5GB"``, a fraction of the device's memory,
        or 0 or None for never.
    memory_limit : int, str or None
        Host memory of the worker; the store keeps below ``target`` of it. None or 0:
        nothing goes to disk, unless distributed asks for memory by :meth:`evict`.
    local_directory : str, optional
        Where the folder for the disk tier is made.
    jit_unspill : bool
        Objects in a value (lists, dicts, dataclasses) move one by one, and come up at first use: whoever reads the
        value gets proxies for them (:mod:`hpcgpu.spill.proxy`). False: a value comes up as a whole, and is real.
    target : float
        The part of ``memory_limit`` that the host tier may fill: distributed's ``worker.memory.target``. 0: no limit.
    max_spill : int, str or None
        The most that may lie on disk: distributed's ``worker.memory.max-spill``. None or 0: what the disk has.
    worker_local_directory : str, optional
        Given by distributed, the worker's own folder: the default of ``local_directory``.

    Raises
    ------
    ConfigError
        A limit is wrong.

    """

    def __init__(
        self,
        device_memory_limit: float | str | None = 0.8,
        memory_limit: int | str | None = None,
        local_directory: str | None = None,
        jit_unspill: bool = False,
        target: float = TARGET,
        max_spill: int | str | None = None,
        worker_local_directory: str | None = None,
    ) -> None:
        device = read_limit("device_memory_limit", device_memory_limit)
        host, disk = size_of("memory_limit", memory_limit), size_of("max_spill", max_spill)
        self.jit_unspill, self._hinted = jit_unspill, False
        self._lock = threading.RLock()
        self._entries: dict[Any, Entry] = {}
        room = int(host * target)
        for note in places.notes(local_directory or worker_local_directory, disk):
            logger.warning(note)
        # as much as the host tier may have: then buffers that wait to be used again never add to its limit
        self.disk = Disk(local_directory or worker_local_directory, Slabs(room or _SLABS_BYTES), disk)
        self.moves = Moves(self._lock, device, room, self.disk)
        self._mover = Mover(self.moves)
        self.keeper = Keeper(self._lock, self.moves, self._mover, jit_unspill)
        # also when the interpreter ends: a plain distributed Worker does not close its data
        self._end = weakref.finalize(self, self._mover.close, os.getpid())

    @property
    def on_fault(self) -> Callable[[SpillError], None] | None:
        """What is called with the error when a value cannot be read back, in the thread that reads."""
        return self.keeper.on_fault

    @on_fault.setter
    def on_fault(self, call: Callable[[SpillError], None] | None) -> None:
        self.keeper.on_fault = call

    def trim(self) -> int:
        """Give host memory that waits to be used again, page-locked too, back to the system; return the bytes."""
        return self.moves.trim()

    @property
    def tiers(self) -> dict[str, int]:
        """Bytes in each tier now."""
        return self.moves.tiers()

    @property
    def counters(self) -> dict[str, Count]:
        """Bytes, number and seconds of the moves so far, by direction."""
        return self.moves.counters

    @property
    def rescues(self) -> int:
        """How many allocations failed on the device and went well after room was made."""
        return self.moves.rescues

    @property
    def immovable(self) -> tuple[int, int]:
        """Number and bytes of the values that cannot be pickled and stay in memory, as far as was tried."""
        with self._lock:
            return self.moves.ledger.kept

    @property
    def spilled_total(self) -> Spilled:
        """What distributed shows as spilled, and takes off what it believes to be in the process's memory."""
        ledger = self.moves.ledger
        with self._lock:
            elsewhere = ledger.bytes["device"] + ledger.bytes["disk"] - ledger.copy_bytes
            return Spilled(elsewhere, ledger.spilled_bytes)

    @property
    def fast(self) -> bool:
        """Whether there is something in host memory that could go, for distributed's memory monitor."""
        return self.tiers["host"] + self.moves.ledger.copy_bytes + self.moves.idle_bytes > 0

    def evict(self) -> int:
        """Ask for more host memory (distributed's memory monitor, on the event loop); always -1: it happens later.

        What waits to be used again goes first, page-locked memory too; if that is not enough, data goes to disk.
        """
        self.moves.squeeze()
        self._mover.wake()
        return -1

    def expect(self, task: Any, keys: Iterable[Any], priority: tuple[Any, ...], *, running: bool) -> None:  # noqa: ANN401
        """Note that a task needs these keys: they go down last, and are brought up before it starts, if there is room.

        Parameters
        ----------
        task : hashable
            The task's key.
        keys : iterable
            Those that this store does not have are passed over.
        priority : tuple
            Of the task; the smallest is the next to run.
        running : bool
            False: the task is ready and waits for a thread.

        """
        with self._lock:
            units = [u for k in keys if k in self._entries for u in self._entries[k].used_units]
            self.moves.foresight.expect(task, units, priority, running)
        if any(u.tier != u.top for u in units):
            self._mover.wake()

    def expect_no_more(self, task: Any) -> None:  # noqa: ANN401
        """Note that a task is over, or does not run here."""
        with self._lock:
            self.moves.foresight.forget(task)

    def settle(self, timeout_s: float = 60.0) -> bool:
        """Wait until no move is under way or due; return whether that came within ``timeout_s``."""
        return self._mover.settle(timeout_s)

    def close(self) -> None:
        """Stop moving, forget everything, remove the folder."""
        self.keeper.on_fault = None
        self._end()
        self.clear()

    def handing_out_handles(self, *, to_worker: bool = True) -> AbstractContextManager[None]:
        """Let reads in this context return a Handle for what is not up.

        Parameters
        ----------
        to_worker : bool
            Whether they are sent to a worker, whose store may keep them packed, and not to a client.

        """
        return reading(Reader(to_worker))

    @contextmanager
    def using(self, keys: Iterable[Any]) -> Iterator[None]:
        """Keep the values of these keys where they are, and hand out real values, while a task runs on them."""
        with self._lock:
            units = [u for k in keys if k in self._entries for u in self._entries[k].used_units]
        with reading(None), self.keeper.pinned(units):
            yield

    def __setitem__(self, key: Any, value: Any) -> None:  # noqa: ANN401
        with self._lock:
            entry = self._entry_of(value)
            self._name(entry)
            old = self._entries.pop(key, None)
            self._entries[key] = entry
            self.keeper.touch(entry.units)
            if old is not None:
                self._drop(old)
            del old
        if self.moves.is_due():
            self._mover.wake()

    def __getitem__(self, key: Any) -> Any:  # noqa: ANN401
        with self._lock:
            entry = self._entries[key]
            self.keeper.touch(entry.used_units)
            who = reader()
            if not who:  # an actor, a client in a task, get_worker().data: who reads so may keep it, and write to it
                for unit in entry.used_units:
                    unit.volatile = True
            if entry.value is not ABSENT:
                return entry.value
        if who:
            return Handle(self.keeper, entry, key, who.to_worker)
        if not self._hinted and asyncio._get_running_loop() is not None:
            self._hinted = True
            logger.warning(_HINT)
        return self.keeper.restore(entry, key)

    def __delitem__(self, key: Any) -> None:  # noqa: ANN401
        with self._lock:
            self._drop(self._entries.pop(key))
        if self.moves.is_due():
            self._mover.wake()

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[Any]:
        return iter(list(self._entries))

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        """Delete all keys; MutableMapping's own would read every value first."""
        for key in self:
            del self[key]

    def _entry_of(self, value: Any) -> Entry:  # noqa: ANN401
        if isinstance(value, Handle) and value.keeper is self.keeper:
            return value.entry
        if isinstance(value, Packed):
            return self.keeper.catalog.entry_of_packed(value)
        return self.keeper.catalog.entry_of(value)

    def _name(self, entry: Entry) -> None:
        entry.keys += 1
        if entry.keys > 1:
            return
        for unit in entry.units:
            unit.join(entry)
            if not unit.counted:
                self.moves.ledger.add(unit)
            elif unit.measured() != unit.nbytes:  # an object has joined it
                self.moves.ledger.moved(unit, unit.tier)

    def _drop(self, entry: Entry) -> None:
        entry.keys -= 1
        if entry.keys:
            return
        for unit in entry.units:
            unit.leave(entry)
            if not unit.entries:
                self.moves.ledger.forget(unit)
                unit.parts = None  # they refer to it: its bytes would wait for the garbage collector
