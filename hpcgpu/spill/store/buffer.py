"""The store: a mapping whose values live on the device, in host memory or on disk.

``in``, ``len``, ``iter``, ``keys`` and ``del`` move no value. To set a value only counts it; the spill thread moves
values above a limit down. To read a value brings it up, in the reading thread. distributed's event loop reads inside
:meth:`GpuSpillBuffer.handing_out_handles`: there a value that is not up is read as a :class:`Handle`, and resolved in a
thread that may wait.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

from hpcgpu.errors import SpillError
from hpcgpu.host.scratch import notes
from hpcgpu.model import settings
from hpcgpu.spill.devices.allocation_failure import on_event_loop
from hpcgpu.spill.proxies import unproxy
from hpcgpu.spill.state.instructions import DEVICE, HOST
from hpcgpu.spill.storage.disk import Disk, Slabs
from hpcgpu.spill.store.executor import Executor
from hpcgpu.spill.store.handles import Handle, ReadMode, read_mode, reading
from hpcgpu.spill.store.identity_map import Reader
from hpcgpu.spill.store.inbox import Count, Todo
from hpcgpu.spill.store.spill_thread import SpillThread
from hpcgpu.spill.values.host_objects import is_owner
from hpcgpu.spill.values.unit import ABSENT, Entry

logger = logging.getLogger("distributed.worker.memory")
_HINT = (
    "values are brought up on the event loop, and the worker does not answer meanwhile: "
    "--preload hpcgpu.spill.preload makes moves asynchronous"
)
_SLABS_BYTES = 1 << 30  # if the host tier has no limit
_WHERE = "keyword {} of GpuSpillBuffer"
TARGET = 0.6  # distributed.yaml, worker.memory.target


class Spilled(NamedTuple):
    """The figures that distributed reports as spilled, in bytes."""

    memory: int  # of values that are not in the process's memory: on the device, or on disk
    disk: int  # of values below the tier in which they are used; with 0 the dashboard shows no spilling


class GpuSpillBuffer(MutableMapping[Any, Any]):
    """Keys to values, device → host → disk.

    Thread-safe: distributed's worker makes it and calls it on its event loop, tasks and clients in their own threads.
    Reads without handles, and :meth:`settle`, may wait for copies; :meth:`trim` and :meth:`close` take a moment. To set
    a value brings up handles and proxies of another store. Other calls wait for no copy, but may free memory.

    Parameters
    ----------
    device_memory_limit : int, float or str
        Moves from the device to the host begin here: bytes, ``"5GB"``, a fraction of the device's memory, or 0 or None
        for never.
    memory_limit : int, str or None
        Host memory of the worker in bytes; the store keeps below ``target`` of it. None, 0 or ``"auto"``: nothing goes
        to disk, unless distributed asks for memory by :meth:`evict`.
    local_directory : str, optional
        The folder in which the disk tier makes its own.
    jit_unspill : bool
        Objects in a value (lists, dicts, dataclasses) move one by one, and come up at first use: readers of the value
        get proxies for them (``hpcgpu.spill.proxies``). False: a value comes up as a whole, and is real.
    target : float
        The part of ``memory_limit`` that the host tier may fill: distributed's ``worker.memory.target``. 0: no limit.
    max_spill : int, str or None
        The most that the files on disk may take: distributed's ``worker.memory.max-spill``. None or 0: no limit but the
        disk's.
    worker_local_directory : str, optional
        The worker's own folder, which distributed gives: the default of ``local_directory``.
    quiet : bool
        Log no warnings about the folder: they were logged for all workers of the node.
    trust_local_directory : bool
        Accept ``local_directory`` even if others can change a folder above it.

    Examples
    --------
    >>> import numpy as np
    >>> store = GpuSpillBuffer(device_memory_limit=0, memory_limit="10MB")  # for the host tier 0.6 of that
    >>> store["a"], store["b"] = np.zeros(1 << 22, "u1"), np.ones(1 << 22, "u1")
    >>> store.settle(), store.tiers["host"]  # both do not fit: the older one goes to disk
    (True, 4194304)
    >>> int(store["a"].sum())  # and comes back
    0
    >>> store.close()

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
        self.jit_unspill, self._hinted = _read_flag("jit_unspill", jit_unspill), False
        # returns the bytes of the process above the target of evict(); called in the spill thread
        self.above_target: Callable[[], int] | None = None
        self._entries: dict[Any, Entry | None] = {}  # None: the store is closed
        folder = None if local_directory is None else _read("local_directory", local_directory, settings.read_text)
        folder = folder or worker_local_directory
        for note in () if _read_flag("quiet", quiet) else notes(folder, disk):
            logger.warning(note)
        slabs = Slabs(self.host_limit_bytes or _SLABS_BYTES)
        self.disk = Disk(folder, slabs, disk, trusted=_read_flag("trust_local_directory", trust_local_directory))
        self._executor = Executor(device, self.host_limit_bytes, self.disk)
        self._spill_thread = SpillThread(self._executor)
        self._reader = Reader(self._executor, self.jit_unspill)
        # a plain Worker does not close its data
        self._end = weakref.finalize(self, self._spill_thread.close, os.getpid())

    @property
    def on_fault(self) -> Callable[[SpillError], None] | None:
        """Called with the error when a value cannot be read back, or the GPU is lost; in any thread."""
        return self._executor.on_fault

    @on_fault.setter
    def on_fault(self, call: Callable[[SpillError], None] | None) -> None:
        self._executor.on_fault = call

    @property
    def host_is_short(self) -> Callable[[], bool] | None:
        """Returns whether the kernel has little memory left; then the store, which calls it each second, trims."""
        return self._spill_thread.host_is_short

    @host_is_short.setter
    def host_is_short(self, call: Callable[[], bool] | None) -> None:
        self._spill_thread.host_is_short = call
        self._executor.wake()

    @property
    def trouble(self) -> tuple[str, ...]:
        """Why a tier stays above its limit: a sentence for each such tier."""
        return tuple(self._executor.reports.trouble.values())

    @property
    def history(self) -> tuple[str, ...]:
        """The last 1,000 events of the store, or more, as lines of JSON: numbers and sizes, no keys and no data."""
        return self._executor.history()

    def trim(self) -> int:
        """Give memory that waits to be used again back; return the bytes of the host's, page-locked too."""
        self._executor.give_back()
        return self._executor.trim()

    @property
    def idle_bytes(self) -> int:
        """Host memory that waits to be used again."""
        return self._executor.idle_bytes

    @property
    def device_limit_bytes(self) -> int:
        """Moves from the device begin here; 0: never, or the device is not known yet."""
        return self._executor.state.usage(DEVICE).limit

    @property
    def tiers(self) -> dict[str, int]:
        """Bytes in each tier now; clean copies of values that are up are not counted."""
        return self._executor.tiers()

    @property
    def copy_bytes(self) -> int:
        """Bytes of such clean copies in host memory."""
        return self._executor.state.usage(HOST).copies

    @property
    def counters(self) -> dict[str, Count]:
        """Bytes, number and seconds of all moves so far, by direction."""
        return self._executor.counters

    @property
    def rescues(self) -> int:
        """The number of allocations that failed on the device and succeeded after room was made."""
        return self._executor.rescues

    @property
    def immovable(self) -> tuple[int, int]:
        """Number and bytes of the values that stay in memory since they could not be pickled."""
        with self._executor.lock:
            return len(self._executor.immovable), sum(self._executor.immovable.values())

    @property
    def spilled_total(self) -> Spilled:
        """The bytes that distributed shows as spilled, and subtracts from its count of the process's memory."""
        tiers = self.tiers
        return Spilled(tiers["device"] + tiers["disk"] - self.copy_bytes, self._executor.state.lower_bytes)

    @property
    def fast(self) -> bool:
        """True if host memory has data that could go, for distributed's memory monitor."""
        return self.tiers["host"] + self.copy_bytes + self.idle_bytes > 0

    def evict(self) -> int:
        """Ask for more host memory, for distributed's memory monitor; return -1, since it comes later.

        Free memory that is kept goes first, then data, until ``above_target`` returns 0; without it, a tenth of both.
        """
        self._spill_thread.request_shrink(self.above_target)
        return -1

    def expect(self, task: Any, keys: Iterable[Any], priority: tuple[Any, ...], *, running: bool) -> None:
        """Let the keys that a running or ready task needs go down last, and come up before it starts, if there is room.

        Unknown keys are skipped. The ready task of the smallest priority runs next.
        """
        units = [unit for key in keys if (entry := self._entries.get(key)) for unit in entry.units]
        self._executor.report(self._executor.state.expect, task, units, priority, running)

    def expect_no_more(self, task: Any) -> None:
        """Forget the keys of a task that is over, or does not run here."""
        self._executor.report(self._executor.state.task_over, task)

    def settle(self, timeout_s: float = 60.0) -> bool:
        """Wait until no move is under way or due; return whether that was within ``timeout_s``."""
        return self._spill_thread.settle(timeout_s)

    def close(self) -> None:
        """Stop moves, give up all values, remove the folder; keys stay, since distributed counts them afterwards."""
        self.on_fault = None
        self._end()
        todo = Todo()
        with self._executor.lock:
            for key, entry in self._entries.items():
                if entry is not None:
                    self._executor.unname(entry, todo)
                    self._entries[key] = None
        self._executor.carry_out(todo)

    def handing_out_handles(self, *, to_worker: bool = True, leaving: bool = False) -> AbstractContextManager[None]:
        """Let reads in this context return a Handle for a value that is not up.

        ``to_worker``: the values are sent to a worker, not to a client. ``leaving``: also for a value that is up, if it
        has parts on a device, or proxies: a thread reads it for a message.
        """
        return reading(ReadMode(to_worker, leaving))

    @contextmanager
    def using(self, keys: Iterable[Any]) -> Iterator[None]:
        """Keep the values of these keys in their tiers, and give readers real values, while a task runs on them."""
        units = {unit: None for key in keys if (entry := self._entries.get(key)) for unit in entry.used_units}
        with reading(None), self._executor.needing(units, stays=True):
            try:
                yield
            except Exception as e:
                self._executor.report_lost_gpu(e)
                raise

    def __setitem__(self, key: Any, value: Any) -> None:
        reader, executor = self._reader, self._executor
        ours = isinstance(value, Handle) and value.reader is reader
        if isinstance(value, Handle) and not ours:  # a handle is never kept as a value
            value = unproxy(value.resolve())
        make = None if ours or is_owner(value) else reader.traverse(value)
        todo = None
        executor.count_kept()
        with executor.lock:
            old = self._entries.get(key)  # first: it fails if the key cannot be hashed or compared
            if make:
                entry = make(todo := Todo())
            elif ours:
                entry = value.entry
            else:
                entry = reader.entry_of_owner(value)
            entry.key = key
            out = executor.name(entry)
            self._entries[key] = entry
            if out or old is not None or executor.orphans:
                todo = todo or Todo()
                executor.record(out, todo)
                if old is not None:
                    executor.unname(old, todo)
        if todo is not None:
            executor.carry_out(todo)

    def __getitem__(self, key: Any) -> Any:
        mode, executor = read_mode(), self._executor
        with executor.lock:
            entry = self._entries[key]
            if entry is None:
                raise SpillError(f"the value of {key!r} went when its store was closed")
            value = entry.value if mode is None or not mode.leaving or entry.is_plain else ABSENT
            if value is not ABSENT:
                # an actor, a client in a task, get_worker().data: such readers may keep it, and write to it
                out = executor.state.used(entry.used_units, mode is None)
                if not out:
                    return value
                executor.record(out, todo := Todo())
            else:
                executor.record(executor.name(entry), todo := Todo())
                handle = Handle(self._reader, entry)  # other threads may delete the key meanwhile
        executor.carry_out(todo)
        if value is not ABSENT or mode:
            return handle if value is ABSENT else value
        if not self._hinted and on_event_loop():
            self._hinted = True
            logger.warning(_HINT)
        try:
            return self._reader.restore(entry, writes=True)
        finally:
            del handle
            executor.carry_out(Todo())

    def __delitem__(self, key: Any) -> None:
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


def read_limits(device: object, host: object, target: object, disk: object) -> tuple[settings.Limit, int, int]:
    """Return the device's limit, and those of host and disk in bytes; 0: none, also for "auto". No part of a node."""
    limit = _read("device_memory_limit", device, settings.read_device_limit)
    memory = _read("memory_limit", host, settings.read_host_limit)
    host_bytes = memory.bytes_of(0, "memory_limit", settings.NODE_MEMORY, where=_WHERE.format("memory_limit"))
    target_bytes = host_bytes * _read("target", target, settings.read_part)
    return limit, max(int(target_bytes), 1) if target_bytes else 0, _read("max_spill", disk, settings.read_disk_limit)


def _read(name: str, value: object, read: Callable[[Any], Any]) -> Any:
    return settings.read_option(name, value, _WHERE.format(name), read)


def _read_flag(name: str, value: object) -> bool:
    return bool(_read(name, False if value is None else value, settings.read_flag))
