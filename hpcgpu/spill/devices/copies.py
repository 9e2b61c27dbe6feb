"""Copies between a CUDA device and host memory, by the driver (cuda-bindings 13.5), through page-locked memory."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from hpcgpu.errors import SpillError, chain_of
from hpcgpu.host import host_memory
from hpcgpu.host.cuda_driver import LASTING
from hpcgpu.spill.devices.device import Copies
from hpcgpu.spill.storage.disk import pipelined
from hpcgpu.spill.storage.pinned import PinnedPool, copy_bytes, is_pinned, touch

# Page-locked memory for one GPU, which other processes cannot have, and which cannot be swapped: at most so much of the
# host tier, or without one at most so many bytes.
PINNED_PART, PINNED_BYTES = 0.5, 4 * 2**30
# So much of it is locked before it is needed, once the device is half full; and of the device's memory at most a part.
_AHEAD_BYTES, _AHEAD_PART = 2**30, 1 / 16
# With less of the host's memory left, no more is locked: the kernel may have to end processes. The store's worker gives
# back what it keeps then.
_LEFT = 0.1
# Copies from and to ordinary memory go through page-locked stages: one is filled while the one before it is emptied.
_STAGE_BYTES, _STAGES, _STAGED_MOVES = 8 * 2**20, 3, 4
# Smaller buffers are not worth locked pages.
_PINNED_FROM_BYTES = 2**20
# A thread that sleeps until an event wakes up late: 0.4 ms on an H200. So it polls as long as a small copy may take.
_POLL_S = 100e-6


_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE: for all contexts of the process
logger = logging.getLogger("distributed.worker.memory")
# The attribute with the number of the driver's error, which is the runtime's, too; by library.
_NUMBERS = {"hpcgpu": "status", "cupy_backends": "status", "torch": "error_code", "numba": "code"}


class DriverError(SpillError):
    """A call of the driver fails; ``status`` is CUDA's number for it."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


def is_lasting(error: BaseException) -> bool:
    """Tell whether an error, or one that led to it, means that this process can use its GPU no more."""
    for each in chain_of(error):
        number = _NUMBERS.get(type(each).__module__.partition(".")[0])
        if number is not None and getattr(each, number, 0) in LASTING:
            return True
    return False


class DriverCopies(Copies):
    """Copies by cuda.bindings, on two non-blocking streams, one for each direction, with events that are used again."""

    def __init__(self, number: int) -> None:
        from cuda.bindings import driver

        self.driver = driver
        self.call("cuInit", 0)
        self.handle = self.call("cuDeviceGet", number)
        self.memory_bytes = int(self.call("cuDeviceTotalMem", self.handle))
        attributes = driver.CUdevice_attribute
        # a vGPU without unified memory has none
        self.has_pools = self._has(attributes.CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED)
        # Grace: ordinary memory is as good as locked pages
        self._reads_host = self._has(attributes.CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES)
        self._has_context_events = self.call("cuDriverGetVersion") >= 12050 and hasattr(driver, "cuCtxRecordEvent")
        self._events, self._is_refused = deque[Any](), False  # that no copy has; whether a refusal was logged
        # CuPy and cuda.core use the primary context, too
        self._context = self.call("cuDevicePrimaryCtxRetain", self.handle)
        non_blocking = int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
        with self.context():
            self._down = self.call("cuStreamCreate", non_blocking)
            self.up_stream = self.call("cuStreamCreate", non_blocking)
        self._host = PinnedPool(0 if self._reads_host else PINNED_BYTES, self._lock_pages, self._unlock_pages)
        stages = 0 if self._reads_host else _STAGED_MOVES * _STAGES * _STAGE_BYTES
        self._stages = PinnedPool(stages, self._lock_pages, self._unlock_pages)
        self._idle_stages = deque[_Stage]()
        self._tier_bytes: int | None = None

    def _has(self, attribute: Any) -> bool:
        return bool(self.call("cuDeviceGetAttribute", attribute, self.handle))

    def call(self, name: str, *arguments: object) -> Any:
        """Call a function of the driver and return its value; MemoryError if the driver has no memory."""
        status, *values = getattr(self.driver, name)(*arguments)
        if status:
            if status == self.driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
                raise MemoryError(f"{name}: {status.name}")
            raise DriverError(f"{name} of the CUDA driver fails: {status.name}", int(status))
        return values[0] if values else None

    @contextmanager
    def context(self) -> Iterator[None]:
        """Work on the device; afterwards the thread has its earlier device again, or this one if it had none."""
        before = int(self.call("cuCtxGetCurrent"))
        if not before:
            self.call("cuCtxSetCurrent", self._context)
        if before in (0, int(self._context)):
            yield
            return
        self.call("cuCtxPushCurrent", self._context)
        try:
            yield
        finally:
            self.call("cuCtxPopCurrent")

    @property
    def free_bytes(self) -> int:
        with self.context():
            return int(self.call("cuMemGetInfo"))

    @property
    def idle_bytes(self) -> int:
        return self._host.free_bytes + self._stages.free_bytes + sum(s.memory.nbytes for s in tuple(self._idle_stages))

    def lock_at_most(self, nbytes: int) -> None:
        """Lock no more pages for whole buffers than a part of a store's host tier; the smallest one counts."""
        self._tier_bytes = min(nbytes, nbytes if self._tier_bytes is None else self._tier_bytes)
        if not self._reads_host:
            self._host.limit_bytes = int(self._tier_bytes * PINNED_PART)

    def lock_ahead(self) -> bool:
        """Lock a little memory if not enough of it waits for the next moves; return whether to call it again."""
        return self._host.lock_ahead(int(min(_AHEAD_BYTES, self.memory_bytes * _AHEAD_PART)))

    def trim(self, nbytes: float = math.inf) -> int:
        freed = self._host.trim(nbytes)
        if nbytes > freed:
            with suppress(IndexError):  # it is empty
                while True:
                    self._events.append(self._idle_stages.pop().done)
        return freed + (self._stages.trim(nbytes - freed) if nbytes > freed else 0)

    def synchronize(self) -> None:
        with self.context():
            self._wait_for_all()

    def _wait_for_all(self, stream: Any = None) -> None:
        """Let a stream wait, in the context, for the work of all others; without one this thread waits."""
        if not self._has_context_events:
            # Neither CuPy nor cuda.core tells on which streams an array was written, and an event on the legacy default
            # stream does not wait for non-blocking streams. cuCtxSynchronize takes a whole core while it waits (H200,
            # driver 580): it is for drivers before CUDA 12.5.
            self.call("cuCtxSynchronize")
            return
        with self._event() as done:
            self.call("cuCtxRecordEvent", self._context, done)
            if stream is None:
                self._wait(done)
            else:
                self.call("cuStreamWaitEvent", stream, done, 0)

    def _wait(self, event: Any) -> None:
        """Wait for an event: poll first, then sleep."""
        end_s, pending = time.perf_counter() + _POLL_S, self.driver.CUresult.CUDA_ERROR_NOT_READY
        while (status := self.driver.cuEventQuery(event)[0]) == pending:
            if time.perf_counter() > end_s:
                break
        if status:
            self.call("cuEventSynchronize", event)

    def to_host(self, pointer: int, nbytes: int, empty: Callable[[int], np.ndarray]) -> np.ndarray:
        """Return a copy of device memory: in page-locked memory if there is some, else in an array by ``empty``."""
        return self.to_host_each([(pointer, nbytes)], empty)[0]

    def to_host_each(self, extents: Sequence[tuple[int, int]], empty: Callable[[int], np.ndarray]) -> list[np.ndarray]:
        """Return copies of several allocations, after one wait for the device's work."""
        with self.context():
            self._wait_for_all(self._down)
            total = sum([nbytes for _, nbytes in extents])
            is_small = total < _PINNED_FROM_BYTES and not self._reads_host
            if is_small or (len(extents) > 1 and total <= _STAGE_BYTES):
                roots = [empty(nbytes) for _, nbytes in extents]
                self._down_in_one_stage(extents, roots)
                return roots
            return [self._copied_down(pointer, nbytes, empty) for pointer, nbytes in extents]

    def _copied_down(self, pointer: int, nbytes: int, empty: Callable[[int], np.ndarray]) -> np.ndarray:
        pinned = self._host.take(nbytes) if nbytes >= _PINNED_FROM_BYTES else None
        root = empty(nbytes) if pinned is None else pinned
        if pinned is not None or (self._reads_host and nbytes):
            self._in_one(self._down, "cuMemcpyDtoHAsync", pointer, root, to_host=True)
        elif nbytes:
            self._down_by_stages(pointer, root)
        return root

    def to_device(self, root: np.ndarray, pointer: int, after: int) -> None:
        """Copy to device memory; the stream of its allocation may still use the memory."""
        with self.context():
            stream = self.up_stream
            if root.nbytes < _PINNED_FROM_BYTES:
                stream = after  # in its order; a large copy would hold up what else is given to it
            elif int(stream) != after:
                with self._event() as allocated:
                    self.call("cuEventRecord", allocated, after)
                    self.call("cuStreamWaitEvent", stream, allocated, 0)
            if is_pinned(root) or self._reads_host:
                self._in_one(stream, "cuMemcpyHtoDAsync", pointer, root, to_host=False)
            else:
                self._up_by_stages(root, pointer, stream)

    def _in_one(self, stream: Any, copy: str, pointer: int, root: np.ndarray, *, to_host: bool) -> None:
        parts = root.base.pool.parts(root) if is_pinned(root) else [slice(0, root.nbytes)]  # type: ignore[union-attr]
        with self._finished(stream), self._event() as done:
            for part in parts:
                ends = pointer + part.start, root.ctypes.data + part.start
                self.call(copy, *(reversed(ends) if to_host else ends), part.stop - part.start, stream)
            self.call("cuEventRecord", done, stream)
            self._wait(done)

    def _down_in_one_stage(self, extents: Sequence[tuple[int, int]], roots: Sequence[np.ndarray]) -> None:
        """Copy allocations that fit into a stage: a thread that waits for each wakes up for each."""
        places = [0, *accumulate([nbytes for _, nbytes in extents])]

        def start(stage: _Stage, _: slice) -> None:
            for (pointer, nbytes), at in zip(extents, places, strict=False):
                if nbytes:
                    self.call("cuMemcpyDtoHAsync", stage.address + at, pointer, nbytes, self._down)
            self.call("cuEventRecord", stage.done, self._down)

        def finish(stage: _Stage, _: slice) -> None:
            self._wait(stage.done)
            for root, at in zip(roots, places, strict=False):
                copy_bytes(root, stage.memory[at : at + root.nbytes])

        self._by_stages(places[-1], self._down, start, finish)

    def _down_by_stages(self, pointer: int, root: np.ndarray) -> None:
        def start(stage: _Stage, part: slice) -> None:
            self.call("cuMemcpyDtoHAsync", stage.address, pointer + part.start, part.stop - part.start, self._down)
            self.call("cuEventRecord", stage.done, self._down)

        def finish(stage: _Stage, part: slice) -> None:
            self._wait(stage.done)
            copy_bytes(root[part], stage.memory[: part.stop - part.start])

        self._by_stages(root.nbytes, self._down, start, finish)

    def _up_by_stages(self, root: np.ndarray, pointer: int, stream: Any) -> None:
        def start(stage: _Stage, part: slice) -> None:
            nbytes = part.stop - part.start
            copy_bytes(stage.memory[:nbytes], root[part])
            self.call("cuMemcpyHtoDAsync", pointer + part.start, stage.address, nbytes, stream)
            self.call("cuEventRecord", stage.done, stream)

        self._by_stages(root.nbytes, stream, start, lambda stage, _: self._wait(stage.done))

    def _by_stages(
        self,
        nbytes: int,
        stream: Any,
        start: Callable[[_Stage, slice], None],
        finish: Callable[[_Stage, slice], None],
    ) -> None:
        stages: list[_Stage] = []
        try:
            stages += (self._stage() for _ in range(min(_STAGES, -(-nbytes // _STAGE_BYTES))))
            pipelined(nbytes, _STAGE_BYTES, stages, start, finish)
        except BaseException:
            self.call("cuStreamSynchronize", stream)  # as _finished
            raise
        finally:
            for stage in stages:
                if is_pinned(stage.memory):
                    self._idle_stages.append(stage)
                else:  # the next move asks for locked memory again
                    self._events.append(stage.done)

    def _stage(self) -> _Stage:
        try:
            return self._idle_stages.pop()
        except IndexError:
            # without page-locked memory the driver copies from and to ordinary memory, through stages of its own
            memory = self._stages.take(_STAGE_BYTES)
            memory = np.empty(_STAGE_BYTES, np.uint8) if memory is None else memory
            return _Stage(memory, memory.ctypes.data, self._new_event())

    @contextmanager
    def _finished(self, stream: Any) -> Iterator[None]:
        """Let no part of a failed copy stay under way to page-locked memory, which another copy gets next."""
        try:
            yield
        except BaseException:
            self.call("cuStreamSynchronize", stream)
            raise

    @contextmanager
    def _event(self) -> Iterator[Any]:
        """Lend an event; a user's ``__del__`` may make a copy in the middle of one, and needs an event of its own."""
        try:
            event = self._events.pop()
        except IndexError:
            event = self._new_event()
        try:
            yield event
        finally:
            self._events.append(event)

    def _new_event(self) -> Any:
        # blocking: a thread that spins would take a core from the tasks
        flags = self.driver.CUevent_flags
        return self.call("cuEventCreate", int(flags.CU_EVENT_BLOCKING_SYNC) | int(flags.CU_EVENT_DISABLE_TIMING))

    def _lock_pages(self, memory: np.ndarray) -> None:
        """Lock a chunk; MemoryError: not now, so copies go another way."""
        if host_memory.memory_left() < _LEFT:
            raise MemoryError("little host memory is left")
        touch(memory)
        try:
            with self.context():
                self.call("cuMemHostRegister", memory.ctypes.data, memory.nbytes, _PORTABLE)
        except (DriverError, MemoryError) as e:
            if getattr(e, "status", 0) in LASTING:
                raise
            if not self._is_refused:
                self._is_refused = True
                logger.warning("the GPU's driver locks no pages: %s; copies go by other ways, which are slower", e)
            raise MemoryError(str(e)) from e

    def _unlock_pages(self, memory: np.ndarray) -> None:
        with suppress(SpillError), self.context():  # the GPU is lost, or the driver has ended before the process
            self.call("cuMemHostUnregister", memory.ctypes.data)


class _Stage(NamedTuple):
    memory: np.ndarray
    address: int
    done: Any  # an event
