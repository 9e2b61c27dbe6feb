"""Values to frames, and frames to values: pickle, with the bytes of arrays out of band.

A device array of a worker with the spill store is written as the store sends it to a peer: as host bytes and the layout
of the arrays in them. Where there is no GPU it is read as a NumPy array.
"""

from __future__ import annotations

import functools
import io
import pickle
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from distributed import get_worker
from distributed.protocol.pickle import dumps
from distributed.worker import thread_state

from hpcgpu.checkpoint.segments import Chunk, Place, read
from hpcgpu.errors import ConfigError
from hpcgpu.spill.devices.libraries import ArrayView, BytesView
from hpcgpu.spill.store.buffer import GpuSpillBuffer
from hpcgpu.spill.store.handles import Handle, Packed

# What the pickles of CuPy's arrays, and of those that the spill store packs, name, and what is read in its place.
_CUPY = ("cupy._core.core", "array")
_DEVICE = ("hpcgpu.spill.devices.cuda", "CudaDevice")
# Chunks that this process has loaded: they are written already. A folder may have another name on another node.
LOADED: set[Chunk] = set()


def to_frames(value: Any) -> list[memoryview]:
    """Pickle a value, or a handle of the spill store, whose device arrays are not brought up; raises as pickle."""
    buffers: list[pickle.PickleBuffer] = []
    value = value.packed() if isinstance(value, Handle) else value
    pickled = dumps(value, buffer_callback=buffers.append)
    return [memoryview(pickled), *(buffer.raw() for buffer in buffers)]


def from_frames(frames: Sequence[Any]) -> Any:
    """Make the value of frames that can be written to; a packed one stays packed."""
    return _Unpickler(io.BytesIO(frames[0]), buffers=frames[1:]).load()


def load(folder: str, chunk: tuple[Any, ...], place: tuple[Any, ...]) -> Any:
    """Read a chunk: the task of a restored one. As the result of a worker with the store it stays in host memory."""
    of = Chunk(*chunk)
    value = from_frames(read(Path(folder), of, Place(*place)))
    LOADED.add(of)
    return value.unpack() if isinstance(value, Packed) and not _goes_to_store() else value


def _goes_to_store() -> bool:
    """Return whether this task only loads, on a worker with the store: Dask fuses it with the task that needs it."""
    try:
        worker = get_worker()
    except ValueError:  # a client, or a scheduler of Dask's own threads
        return False
    function = getattr(worker.state.tasks[thread_state.key].run_spec, "func", None)
    return isinstance(worker.data, GpuSpillBuffer) and getattr(function, "__module__", "").startswith(__package__)


class NumpyDevice:
    """A stand-in for the device of packed arrays, where a process has no GPU."""

    @classmethod
    def current(cls, _: int) -> NumpyDevice:
        """Return it, whatever the device's number."""
        return cls()

    @staticmethod
    def unpack(root: np.ndarray, views: Sequence[Any]) -> list[np.ndarray]:
        """Return the arrays in a buffer's bytes, a plain buffer as bytes; ConfigError for what no array can hold."""
        for library in {view.library for view in views if not isinstance(view, ArrayView | BytesView)}:
            raise _without_gpu(library)
        return [
            root[: v.nbytes] if isinstance(v, BytesView) else np.ndarray(v.shape, v.dtype, root, v.offset, v.strides)
            for v in views
        ]


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return what a pickle names; NumPy's in place of CuPy's where there is no GPU."""
        if (module, name) == _CUPY and not has_gpu():
            return np.asarray
        if (module, name) == _DEVICE and not has_gpu():
            return NumpyDevice
        if (library := module.partition(".")[0]) == "cudf" and not has_gpu():  # its import may work, and no call then
            raise _without_gpu(library)
        return super().find_class(module, name)


def _without_gpu(library: str) -> ConfigError:
    """Return the error for objects that only their library can make, on a GPU."""
    return ConfigError(
        f"the chunk has objects of {library}, and there is no GPU for them on {socket.gethostname()}: load it "
        f"where CuPy and {library} have one. Arrays of CuPy and numba are read as NumPy's everywhere"
    )


@functools.cache
def has_gpu() -> bool:
    """Return whether CuPy can use a GPU in this process."""
    try:
        import cupy

        return bool(cupy.cuda.runtime.getDeviceCount())
    except Exception:  # no CuPy, no driver, no device
        return False
