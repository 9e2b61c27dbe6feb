"""The mapping itself: it reads, writes, and carries out the state machine's instructions.

Here are values that a thread must read: handles on the event loop, and packed values on their way to a peer; and the
wire format of CuPy's arrays.

A worker must neither copy on its event loop nor show handles to user code. So it

- reads its data for a task, and for ``get_data``, inside ``store.handing_out_handles(...)``;
- enters ``store.using(keys)`` in the task's thread, and replaces handles by the values that :meth:`Handle.resolve`
  returns;
- sends, in place of a handle, the value, or a call of :func:`arrive` with the packed value;
- calls :func:`keep_packed` and :func:`register` when it starts;
- sets ``store.on_fault``, and calls ``store.close()`` at its end.

``hpcgpu.deploy.processes.worker_plugin`` does all this. Without it the store returns values everywhere.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from hpcgpu.spill.devices import Device
from hpcgpu.spill.devices.cuda import CudaDevice
from hpcgpu.spill.devices.libraries import ArrayView
from hpcgpu.spill.values.traverse import put_together
from hpcgpu.spill.values.unit import Entry


class ReadMode(NamedTuple):
    """Readers in a context get handles. Immutable; GpuSpillBuffer makes it."""

    to_worker: bool  # the values are sent to a worker
    leaving: bool = False  # also for values that are up, but must be read in a thread to be sent


_mode: ContextVar[ReadMode | None] = ContextVar("hpcgpu-read-mode", default=None)
# Returns the read mode of this context; None: readers get values. Each read calls it, so it is no function in Python.
read_mode = _mode.get


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
        # no lock here: the garbage collector may run this in a thread that holds it
        self.reader.orphans.append(self.entry)

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
    """Return a value from a peer, where it arrives: packed for this process's store, or unpacked in another process."""
    return packed if _keep else packed.unpack()


@functools.cache
def register() -> None:
    """Register handles and CuPy's arrays with dask, in this process: without it each handle would count 64 bytes."""
    from dask.sizeof import sizeof
    from distributed.protocol.serialize import dask_deserialize, dask_serialize

    sizeof.register(Handle, lambda handle: handle.nbytes)
    sizeof.register(Packed, lambda packed: packed.nbytes)
    register_cupy(dask_serialize, dask_deserialize)


def register_cupy(dask_serialize: Any, dask_deserialize: Any) -> None:
    """Let CuPy's arrays travel: between workers by UCX as their bytes, elsewhere as CuPy pickles them."""
    # distributed's own pair of functions needs numba or RMM, and fails without them, also in a client without this
    # package (distributed 2026.8.0, protocol/cupy.py). If its cuda family comes first (UCX), and numba is installed,
    # its pair replaces this one: each reads messages of the other. CuPy is imported with the first array.

    def add() -> None:
        import cupy

        dask_serialize.register(cupy.ndarray, serialize)
        dask_deserialize.register(cupy.ndarray, deserialize)

    dask_serialize.register_lazy("cupy", add)
    dask_deserialize.register_lazy("cupy", add)


def serialize(array: Any) -> tuple[dict[str, Any], list[memoryview]]:
    """Return the layout of an array, made contiguous, and its host bytes; NotImplementedError if not for a worker."""
    import cupy

    with cupy.cuda.Device(array.device.id) as device:
        mode = read_mode()
        if mode is None or not mode.to_worker:
            device.synchronize()  # any stream may write to it; CuPy's copy waits for the current stream only
            raise NotImplementedError
        if not (array.flags.c_contiguous or array.flags.f_contiguous):
            array = cupy.ascontiguousarray(array)
        root = np.empty(0, np.uint8)
        if array.nbytes:
            copies = CudaDevice.current(array.device.id).copies
            root = copies.to_host(int(array.data.ptr), array.nbytes, lambda nbytes: np.empty(nbytes, np.uint8))
    layout = {"shape": array.shape, "strides": array.strides, "typestr": array.dtype.str}
    return {**layout, "dtype": pickle.dumps(array.dtype)}, [root.data]  # bfloat16 and records have no typestr


def deserialize(header: dict[str, Any], frames: list[Any]) -> Any:
    """Return the array, on this process's current device."""
    import cupy

    root = np.frombuffer(frames[0], np.uint8) if frames else np.empty(0, np.uint8)
    dtype = pickle.loads(header["dtype"]) if "dtype" in header else np.dtype(header["typestr"])
    device = CudaDevice.current(int(cupy.cuda.runtime.getDevice()))
    (array,) = device.unpack(root, [ArrayView("cupy", tuple(header["shape"]), dtype, tuple(header["strides"]), 0)])
    return array
