"""A worker's part: the plugin that hears of finished chunks, and the thread that writes them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import heapq
import itertools
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from distributed import Worker
from distributed.comm import CommClosedError
from distributed.diagnostics.plugin import WorkerPlugin

from hpcgpu import supervise
from hpcgpu.checkpoint.segments import OWNER, Chunk, SegmentWriter
from hpcgpu.checkpoint.values import LOADED, to_frames
from hpcgpu.errors import CheckpointError, SpillError, message_of
from hpcgpu.model.waits import Backoff
from hpcgpu.spill.store.buffer import GpuSpillBuffer
from hpcgpu.units import counted

logger = logging.getLogger("distributed.hpcgpu")
# A crash of a node costs at most this much: what was written and not synced. During a sync the disk gets nothing new:
# with one each 64 MiB it wrote 0.66 GiB/s in place of 1.28 (ext4, busy machine).
_SYNC_BYTES = 256 << 20
_BACKOFF = Backoff(first_s=0.5, longest_s=30.0)
NEWS = "hpcgpu-chunks"  # a message to the scheduler: these finished chunks are now
TAKEN, SYNCED, LET_GO = "taken", "synced", "let go"  # the last: not written for now, so they may be dropped
_UNSAVED = 1000  # the most that are named
_DROPPED = "it was dropped while the disk took nothing"
_COMPUTED = ("executing", "long-running")
_SEEN_S, _LOOK_S = 5.0, 0.2  # how long a new file may be unseen on another node
_WRITING_PART = 0.9  # of the time for a flush; the rest is for a sync of what is written
_CLOSE_S = 20.0  # for a worker that closes to write the rest


@dataclass(frozen=True, slots=True)
class Status:
    """The backlog of a worker's writer, and the reasons for it."""

    waiting: int  # finished chunks that are not synced
    trouble: str = ""  # since when, and why, nothing is written; "" if all goes well
    unsaved: Mapping[str, str] = field(default_factory=dict)  # keys that cannot be pickled, and why


class Item(NamedTuple):
    """A chunk to be written; they are ordered by their cost and arrival, and never by their keys."""

    minus_cost_s: float
    number: int
    key: Any
    chunk: Chunk


class Writer:
    """Writes chunks of one worker's data in a thread of its own. Thread-safe."""

    def __init__(self, data: Any, folder: Path, name: str) -> None:
        self._data, self._folder, self._segments = data, folder, SegmentWriter(folder)
        self._due = threading.Condition()
        self._todo: list[Item] = []  # a heap, the dearest first
        self._numbers = itertools.count()
        self._unsynced: list[Item] = []
        self._unsynced_bytes = 0
        self._closing = threading.Event()
        self._hurries = False  # what is written is to be synced now
        self._is_late = False  # the last flush ran out of time
        self._since = self._trouble = ""
        self._unsaved: dict[str, str] = {}
        self._let_go: set[Any] = set()  # keys
        self.users = 0  # plugins; on the event loop
        # what chunks are now (NEWS); in the thread
        self.tell: Callable[[str, list[tuple[Any, Chunk]]], None] = lambda *_: None
        self._loop = supervise.ThreadLoop(
            self._round, f"writing the checkpoint of worker {name}", pause=self._closing.wait, backoff=_BACKOFF
        )

    def put(self, key: Any, chunk: Chunk, cost_s: float = 0.0) -> None:
        """Have a key of the data written, before those that took less time to compute; returns at once."""
        with self._due:
            heapq.heappush(self._todo, Item(-cost_s, next(self._numbers), key, chunk))
            self._due.notify_all()

    @property
    def status(self) -> Status:
        """The state now."""
        with self._due:
            return Status(len(self._todo) + len(self._unsynced), self._trouble, dict(self._unsaved))

    def flush(self, timeout_s: float | None) -> Status:
        """Wait until all that came is synced, or cannot be written for now, or the time is over; return the state."""
        with self._due:
            ready = None if timeout_s is None else timeout_s * _WRITING_PART
            self._is_late = not self._due.wait_for(lambda: self._trouble or not (self._todo or self._unsynced), ready)
            if self._is_late and ready is not None and timeout_s is not None:
                self._hurries = True
                self._due.wait_for(lambda: self._trouble or not self._unsynced, timeout_s - ready)
        return self.status

    async def save(self, limit_s: float) -> str:
        """Write what came, as the worker ends in ``limit_s``; return what is not saved, "" if all is."""
        status = await supervise.to_thread(self.flush, limit_s)
        why = status.trouble or f"the time, {limit_s:.0f} s, was over"
        return f"{counted(status.waiting, 'finished chunk')} not in {self._folder}: {why}" if status.waiting else ""

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """Write the rest, unless the time for that was over before; sync what is written, and end."""
        if not self._is_late:
            self.flush(timeout_s)
        self._closing.set()
        with self._due:
            self._due.notify_all()
        self._loop.join(timeout_s)

    def _round(self) -> bool:
        """Write a chunk, or sync those that are written; return whether this was the last round."""
        with self._due:
            self._due.wait_for(lambda: self._todo or self._unsynced or self._closing.is_set())
            item = self._todo[0] if self._todo and not self._closing.is_set() else None
        try:
            if item and self._unsynced_bytes < _SYNC_BYTES and not self._hurries:
                self._write(item)
            else:
                self._sync()
        except OSError as e:
            self._say(e)
            if self._closing.is_set():
                return True
            if self._unsynced:  # a full disk has room for the chunks that it has
                self._sync(all_is_well=False)
            raise CheckpointError(f"{self._folder}: {message_of(e)}") from e
        return self._closing.is_set() and not self._unsynced

    def _write(self, item: Item) -> None:
        """Write a chunk; OSError if the disk does not take it, and it stays to be done."""
        key, chunk = item.key, item.chunk
        try:
            frames = to_frames(self._read(key))
        except KeyError:  # another worker has it, and is told so by the scheduler, or it was dropped
            frames = []
            if key in self._let_go:
                self._give_up(item, _DROPPED)
        except Exception as e:  # of a user's class, or of a store that was closed
            frames = []
            self._give_up(item, f"{type(e).__name__}: {message_of(e)}")
            if not isinstance(e, SpillError):
                logger.warning("chunk %s is not in the checkpoint, since it cannot be pickled: %s", key, message_of(e))
        nbytes = self._segments.append(chunk, frames) if frames else 0
        with self._due:
            if self._todo[0] is item:
                heapq.heappop(self._todo)
            else:  # a dearer one has come meanwhile
                self._todo.remove(item)
                heapq.heapify(self._todo)
            self._unsynced += [item] if frames else []
            self._unsynced_bytes += nbytes
            self._due.notify_all()

    def _give_up(self, item: Item, why: str) -> None:
        with self._due:
            if len(self._unsaved) < _UNSAVED:
                self._unsaved[str(item.key)] = why
        self.tell(LET_GO, [(item.key, item.chunk)])

    def _read(self, key: Any) -> Any:
        """Return the value of a key, from the tier in which it is."""
        data = self._data
        if isinstance(data, GpuSpillBuffer):
            with data.handing_out_handles(leaving=True):
                return data[key]
        slow = getattr(data, "slow", ())  # distributed's SpillBuffer would bring it up, and move others down
        return slow[key] if key in slow else data[key]

    def _sync(self, *, all_is_well: bool = True) -> None:
        try:
            self._segments.sync()
        except OSError:  # none of them counts: they are written again
            with self._due:
                self._todo += self._unsynced
                heapq.heapify(self._todo)
                self._unsynced, self._unsynced_bytes = [], 0
            raise
        written = self._unsynced
        self.tell(SYNCED, [(item.key, item.chunk) for item in written])
        if self._closing.is_set():
            self._segments.close()
        with self._due:
            self._unsynced, self._unsynced_bytes, self._hurries = [], 0, False
            for item in written:  # of a key that came again
                self._unsaved.pop(str(item.key), None)
            if all_is_well:
                self._since = self._trouble = ""
            self._due.notify_all()

    def _say(self, error: OSError) -> None:
        with self._due:
            self._since = self._since or f"{datetime.now(UTC).astimezone():%Y-%m-%d %H:%M:%S}"
            self._trouble = f"incomplete since {self._since}: {message_of(error)}"
            # else what was dropped stays in the list, which grows as long as the disk is full
            gone = {item for item in self._todo if item.key in self._let_go and item.key not in self._data}
            self._todo = [item for item in self._todo if item not in gone]
            heapq.heapify(self._todo)
            waiting = [(item.key, item.chunk) for item in (*self._todo, *self._unsynced)]
            self._let_go = {key for key, _ in waiting}
            self._due.notify_all()
        self.tell(LET_GO, waiting)
        for item in gone:
            self._give_up(item, _DROPPED)


# The writers of this process, by worker and folder; on the event loop.
_WRITERS: dict[tuple[int, str], Writer] = {}


class CheckpointPlugin(WorkerPlugin):
    """The plugin of a worker for one name: each finished chunk goes to the writer."""

    def __init__(self, folder: str, run: str, outputs: Mapping[Any, int]) -> None:
        self.folder, self.run, self.outputs = folder, run, outputs

    async def setup(self, worker: Worker) -> None:
        """Begin, with the chunks that are there; called by distributed when the plugin or the worker comes."""
        self._key = id(worker), self.folder
        if self._key not in _WRITERS:
            _WRITERS[self._key] = Writer(worker.data, Path(self.folder), str(worker.name))
            _WRITERS[self._key].tell = functools.partial(tell_scheduler, worker, self.folder)
            worker.handlers |= {"hpcgpu_save": saver(worker), "hpcgpu_write": taker(worker)}
        self._writer, self._tasks = _WRITERS[self._key], worker.state.tasks
        self._writer.users += 1
        # 100,000 keys take a second; the loop goes on meanwhile
        await supervise.to_thread(self._take, *tuple(worker.data))

    def transition(self, key: Any, start: str, finish: str, **_: object) -> None:
        """Take a chunk that was computed here; called by distributed."""
        if finish == "memory" and start in _COMPUTED:
            self._take(key)

    async def teardown(self, worker: Worker) -> None:
        """Sync what is written; called by distributed when the plugin or the worker goes."""
        self._writer.users -= 1
        if not self._writer.users:
            _WRITERS.pop(self._key, None)
            await supervise.to_thread(self._writer.close)

    def _take(self, *keys: Any) -> None:
        taken: dict[tuple[Any, Chunk], float] = {}
        for key in keys:
            part = part_of(key, self.outputs)
            if part is not None and (chunk := Chunk(self.run, part)) not in LOADED:
                steps = self._tasks[key].startstops if key in self._tasks else ()
                taken[key, chunk] = sum(step["stop"] - step["start"] for step in steps if step["action"] == "compute")
        self._writer.tell(TAKEN, list(taken))  # first: the writer may be done, and tell so, at once
        for (key, chunk), cost_s in taken.items():
            self._writer.put(key, chunk, cost_s)


def tell_scheduler(worker: Worker, folder: str, state: str, chunks: list[tuple[Any, Chunk]]) -> None:
    """Tell the scheduler what finished chunks are now; in any thread."""
    texts = [(key, chunk.run, chunk.part) for key, chunk in chunks]
    message = {"op": NEWS, "folder": folder, "state": state, "chunks": texts}

    def send() -> None:
        with contextlib.suppress(CommClosedError):  # the worker, or the scheduler, ends
            worker.batched_stream.send(message)

    call = supervise.log_errors(send, "news of finished chunks", supervise.only_log)
    if not chunks:
        return
    try:
        asyncio.get_running_loop()
    except RuntimeError:  # a thread
        with contextlib.suppress(RuntimeError):  # its loop has ended
            worker.loop.add_callback(call)
    else:  # at once: before the scheduler hears that they are finished, so that nobody can drop them between
        call()


def taker(worker: Worker) -> Callable[[str, Sequence[tuple[Any, str, tuple[Any, ...]]]], None]:
    """Return the handler by which a worker writes chunks that another one has lost (``hpcgpu_write``)."""

    def take(folder: str, chunks: Sequence[tuple[Any, str, tuple[Any, ...]]]) -> None:
        if writer := _WRITERS.get((id(worker), folder)):
            for key, run, part in chunks:
                writer.put(key, Chunk(run, part))

    return take


def saver(worker: Worker) -> Callable[[float], Awaitable[list[str]]]:
    """Return the handler by which a worker that is to end writes the rest (``hpcgpu_save``)."""

    async def save(limit_s: float) -> list[str]:
        writers = [writer for (owner, _), writer in _WRITERS.items() if owner == id(worker)]
        return [text for text in await asyncio.gather(*(writer.save(limit_s) for writer in writers)) if text]

    return save


def outputs_of(keys: list[Any]) -> dict[Any, int]:
    """Return the names of a collection's keys, numbered in their order."""
    return {name: i for i, name in enumerate(dict.fromkeys(map(name_of, keys)))}


def name_of(key: Any) -> Any:
    """Return the name of a key: what the keys of a collection's chunks share."""
    return key[0] if isinstance(key, tuple) else key


def part_of(key: Any, outputs: Mapping[Any, int]) -> tuple[Any, ...] | None:
    """Return the place of a chunk in its collection, whatever its keys are called today; None for another key."""
    number = outputs.get(name_of(key))
    return None if number is None else (number, *key[1:]) if isinstance(key, tuple) else (number,)


async def flush(folder: str, timeout_s: float | None, dask_worker: Worker) -> Status:
    """Wait for the writer of a worker; called by the client."""
    writer = _WRITERS.get((id(dask_worker), folder))
    return await supervise.to_thread(writer.flush, timeout_s) if writer else Status(0)


def status(folder: str, dask_worker: Worker) -> Status:
    """Return the state of a worker's writer; called by the client."""
    writer = _WRITERS.get((id(dask_worker), folder))
    return writer.status if writer else Status(0)


async def sees(folder: str, token: str) -> bool:
    """Return whether a worker sees the folder, with the record of its owner; called by the client."""

    def look() -> bool:
        end_s = time.monotonic() + _SEEN_S
        while True:
            with contextlib.suppress(OSError):
                if token in Path(folder, OWNER).read_text():
                    return True
            if time.monotonic() > end_s:
                return False
            time.sleep(_LOOK_S)

    return await supervise.to_thread(look)
