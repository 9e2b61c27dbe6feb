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
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

from hpcgpu.errors import SpillError
from hpcgpu.spill.storage import places
from hpcgpu.spill.storage.disk import Disk
from hpcgpu.spill.storage.slabs import Slabs
from hpcgpu.spill.store.catalog import Seen, is_owner
from hpcgpu.spill.store.executor import Count, Executor, Todo
from hpcgpu.spill.store.handle import Handle
from hpcgpu.spill.store.keeper import Keeper
from hpcgpu.spill.store.limits import read_flags, read_folder, read_limits
from hpcgpu.spill.store.reading import Reader, reader, reading
from hpcgpu.spill.store.spiller import Spiller
from hpcgpu.spill.values.entry import ABSENT, Entry
from hpcgpu.spill.values.unit import Content

logger = logging.getLogger("distributed.worker.memory")
_HINT = (
    "values are brought up on the event loop, and the worker answers nobody meanwhile: --preload hpcgpu.deploy.preload "
    "makes moves asynchronous"
)
_SLABS_BYTES = 1 << 30  # where the host tier has no limit
TARGET = 0.6  # distributed.yaml, worker.memory.target


class Spilled(NamedTuple):
    """What distributed reports as spilled, in bytes.

    ``memory`` is that of the values that are not in the process's memory: on the device, or on disk. ``disk`` is what
    lies below the tier in which it is used; with 0 the dashboard would show nothing (docs/facts/spill.md).

    Immutable; :attr:`GpuSpillBuffer.spilled_total` makes it at each call.
    """

    memory: int
    disk: int


class GpuSpillBuffer(MutableMapping[Any, Any]):
    """Keys to values, device → host → disk.

    Thread-safe: distributed's worker makes it and calls it on its event loop, tasks and clients in their own threads.
    Reading, without handles, and :meth:`settle` may wait for copies, :meth:`trim` and :meth:`close` take a moment, and
    setting brings up proxies of another store. The rest waits for no copy, but may free memory.

    Parameters
    ----------
    device_memory_limit : int, float or str
        Where moving from the device to the host begins: bytes, ``"5GB"``, a fraction of the device's memory,
        or 0 or None for never.
    memory_limit : int, str or None
        Host memory of the worker in bytes; the store keeps below ``target`` of it. None, 0 or ``"auto"``:
        nothing goes to disk, unless distributed asks for memory by :meth:`evict`.
    local_directory : str, optional
        Where the folder for the disk tier is made; ``trust_local_directory``: also where others can change one above.
    jit_unspill : bool
        Objects in a value (lists, dicts, dataclasses) move one by one, and come up at first use: whoever reads the
        value gets proxies for them (``hpcgpu.spill.proxies``). False: a value comes up as a whole, and is real.
    target : float
        The part of ``memory_limit`` that the host tier may fill: distributed's ``worker.memory.target``. 0: no limit.
    max_spill : int, str or None
        The most that the files on disk may take: distributed's ``worker.memory.max-spill``. None or 0: what the disk
        has.
    worker_local_directory : str, optional
        Given by distributed, the worker's own folder: the default of ``local_directory``.
    quiet : bool
        Say nothing of the folder: somebody has, for all workers of the node.

    Attributes
    ----------
    above_target : callable or None
        Tells how many bytes the process has above what :meth:`evict` is to bring it down to; called in the spill
        thread.

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
        quiet: bool = False,
        trust_local_directory: bool = False,
    ) -> None:
        device, self.host_limit_bytes, disk = read_limits(device_memory_limit, memory_limit, target, max_spill)
        jit_unspill, quiet, trust_local_directory = read_flags(
            jit_unspill=jit_unspill, quiet=quiet, trust_local_directory=trust_local_directory
        )
        self.jit_unspill, self._hinted = jit_unspill, False
        self.above_target: Callable[[], int] | None = None
        self._entries: dict[Any, Entry | None] = {}  # None: its value went when the store was closed
        folder = read_folder(local_directory) or worker_local_directory
        for note in () if quiet else places.notes(folder, disk):
            logger.warning(note)
        # as much as the host tier may have: then buffers that wait to be used again never add to its limit
        slabs = Slabs(self.host_limit_bytes or _SLABS_BYTES)
        self.disk = Disk(folder, slabs, disk, trusted=trust_local_directory)
        self._executor = Executor(device, self.host_limit_bytes, self.disk, self.disk.limit_bytes)
        self._spiller = Spiller(self._executor)
        self._keeper = Keeper(self._executor, jit_unspill)
        self._end = weakref.finalize(self, self._spiller.close, os.getpid())  # a plain Worker does not close its data

    @property
    def on_fault(self) -> Callable[[SpillError], None] | None:
        """What is called with the error when a value cannot be read back; a reader or the spill thread calls it."""
        return self._executor.on_fault

    @on_fault.setter
    def on_fault(self, call: Callable[[SpillError], None] | None) -> None:
        self._executor.on_fault = call

    @property
    def host_is_short(self) -> Callable[[], bool] | None:
        """What tells whether the kernel has little memory left; memory that waits to be used again goes back then.

        Called in the spill thread, once a second or so.
        """
        return self._spiller.host_is_short

    @host_is_short.setter
    def host_is_short(self, call: Callable[[], bool] | None) -> None:
        self._spiller.host_is_short = call
        self._spiller.wake()

    @property
    def trouble(self) -> tuple[str, ...]:
        """Why what is above a limit stays there, for each tier of which that is so."""
        return tuple(self._executor.trouble.values())

    def trim(self) -> int:
        """Give host memory that waits to be used again, page-locked too, back to the system; return the bytes."""
        return self._spiller.trim()

    @property
    def idle_bytes(self) -> int:
        """Host memory that waits to be used again."""
        return self._spiller.idle_bytes

    @property
    def device_limit_bytes(self) -> int:
        """Where moving from the device begins; 0: never, or the device is not known yet."""
        return self._executor.device_limit_bytes

    @property
    def tiers(self) -> dict[str, int]:
        """Bytes in each tier now; clean copies of what is in use above are not counted."""
        return self._executor.tiers()

    @property
    def copy_bytes(self) -> int:
        """Bytes of such copies in host memory."""
        return self._executor.copy_bytes

    @property
    def counters(self) -> dict[str, Count]:
        """Bytes, number and seconds of the moves so far, by direction."""
        return self._executor.counters

    @property
    def rescues(self) -> int:
        """How many allocations failed on the device and went well after room was made."""
        return self._executor.rescues

    @property
    def immovable(self) -> tuple[int, int]:
        """Number and bytes of the values that cannot be pickled and stay in memory, as far as was tried."""
        with self._executor.lock:
            kept = self._executor.kept
            return len(kept), sum(kept.values())

    @property
    def spilled_total(self) -> Spilled:
        """What distributed shows as spilled, and takes off what it believes to be in the process's memory."""
        there = self.tiers
        return Spilled(there["device"] + there["disk"] - self.copy_bytes, self._executor.state.tiers.lower_bytes)

    @property
    def fast(self) -> bool:
        """Whether there is something in host memory that could go, for distributed's memory monitor."""
        return self.tiers["host"] + self.copy_bytes + self.idle_bytes > 0

    def evict(self) -> int:
        """Ask for more host memory (distributed's memory monitor, on the event loop); always -1: it happens later.

        What waits to be used again goes first, page-locked memory too; if that is not enough, data goes to disk, until
        nothing is left above ``above_target``. Where nobody tells that, a tenth of what there is goes.
        """
        self._spiller.squeeze(self.above_target)
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
        entries = [entry for key in keys if (entry := self._entries.get(key)) is not None]
        self._executor.tell(self._executor.state.expect, task, entries, priority, running)

    def expect_no_more(self, task: Any) -> None:  # noqa: ANN401
        """Note that a task is over, or does not run here."""
        self._executor.tell(self._executor.state.task_over, task)

    def settle(self, timeout_s: float = 60.0) -> bool:
        """Wait until no move is under way or due; return whether that came within ``timeout_s``."""
        return self._spiller.settle(timeout_s)

    def close(self) -> None:
        """Stop moving, give up all values, remove the folder; the keys stay, since distributed counts them after it."""
        self.on_fault = None
        self._end()
        todo = Todo()
        with self._executor.lock:
            for key, entry in self._entries.items():
                if entry is not None:
                    self._executor.unname(entry, todo)
                    self._entries[key] = None
        self._executor.carry_out(todo)

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
        units = {unit: None for key in keys if (entry := self._entries.get(key)) for unit in entry.used_units}
        with reading(None), self._executor.pinning(units):
            yield

    def __setitem__(self, key: Any, value: Any) -> None:  # noqa: ANN401
        catalog, executor = self._keeper.catalog, self._executor
        ours = isinstance(value, Handle) and value.keeper is self._keeper
        walked = None if ours or is_owner(value) else catalog.seen(value)
        todo = None
        with executor.lock:
            if walked is None:
                entry = value.entry if ours else catalog.entry_of_owner(value)
            else:
                entry = self._entry_of(walked, todo := Todo())
            entry.key = key
            out = executor.name(entry)
            old = self._entries.get(key)
            self._entries[key] = entry
            if out or old is not None or executor.orphans:
                todo = todo or Todo()
                executor.note(out, todo)
                if old is not None:
                    executor.unname(old, todo)
        if todo is not None:
            executor.carry_out(todo)

    def __getitem__(self, key: Any) -> Any:  # noqa: ANN401
        who, executor = reader(), self._executor
        with executor.lock:
            entry = self._entries[key]
            if entry is None:
                raise SpillError(f"the value of {key!r} went when its store was closed")
            value = entry.value
            if value is not ABSENT:
                # an actor, a client in a task, get_worker().data: who reads so may keep it, and write to it
                out = executor.state.used(entry.used_units, who is None)
                if not out:
                    return value
            todo = Todo()
            if value is not ABSENT:
                executor.note(out, todo)
            elif who:
                value = self._keeper.handle(entry, who.to_worker, todo)
            else:
                ticket = executor.reader(entry.used_units, writes=True)
                executor.note(executor.state.need(ticket), todo)
        if value is not ABSENT:
            executor.carry_out(todo)
            return value
        if not self._hinted and asyncio._get_running_loop() is not None:
            self._hinted = True
            logger.warning(_HINT)
        with executor.served(ticket, todo):
            return self._keeper.assembled(entry)

    def __delitem__(self, key: Any) -> None:  # noqa: ANN401
        todo = Todo()
        with self._executor.lock:
            if (entry := self._entries.pop(key)) is not None:
                self._executor.unname(entry, todo)
        self._executor.carry_out(todo)

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

    def _entry_of(self, seen: Seen, todo: Todo) -> Entry:
        """Return the entry of a value; under the lock."""
        grown: list[tuple[Content, int]] = []
        entry = self._keeper.catalog.entry_of(seen, grown)
        for unit, nbytes in grown:
            if unit.valid:
                self._executor.note(self._executor.state.grow(unit, nbytes), todo)
            else:
                unit.nbytes = nbytes
        return entry
