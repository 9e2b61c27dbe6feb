"""Memory and arrays of a simulated GPU: numpy computes, but no data crosses to the host implicitly.

Freed blocks are used again, as by CuPy's memory pool, since new pages are slow: filling them takes 0.08 CPU seconds per
GB longer than filling used pages, and 2.2 on a virtual machine that returns free pages to its host (free page
reporting, Linux 6.18).
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

# The characters of the dtypes of CuPy's kernels (cupy/_core/_dtype.pyx).
NUMBERS = frozenset("?bBhHiIlLqQefdFD")
# Before, a result's dtype depends on the values of numbers, and ufunc.resolve_dtypes does not return it (NEP 50).
_NUMPY_2 = np.lib.NumpyVersion(np.__version__) >= "2.0.0"
COUNTER_BYTES = 8
# malloc reuses smaller blocks itself.
_SMALLEST_BYTES = 128 * 2**10
# A wrapper class: a subclass of ndarray would become a host array in np.asarray and in concatenate.
_IMPLICIT = (
    "Implicit conversion to a NumPy array is not allowed. Please use `.get()` to construct a NumPy array explicitly."
)
# Functions that return a fact for the host, not data; and functions that take host arrays as indices, like CuPy's.
_FACTS = {np.allclose, np.array_equal, np.may_share_memory, np.shares_memory, np.iscomplexobj, np.result_type}
_INDEXED = {np.take, np.take_along_axis, np.delete, np.insert, np.isin}
# With ``like=`` these copy from the host.
_UPLOADS = {np.array, np.asarray, np.asanyarray}
# These write data out: it is copied to the host first.
_OUTPUT = {np.save, np.savez, np.savez_compressed, np.savetxt, np.array2string, np.array_repr, np.array_str}
# The methods and attributes of ndarray that CuPy's arrays have, too.
_ATTRIBUTES = frozenset(
    """
    T size itemsize strides flags all any argmax argmin argpartition argsort astype
    choose clip compress conj conjugate copy cumprod cumsum diagonal dot fill flatten max mean min nonzero partition
    prod ptp put ravel repeat reshape round searchsorted sort squeeze std sum swapaxes take trace transpose
    var view
    """.split()  # a list of so many quoted words is not easier to read
)


class Memory(np.ndarray):
    """A buffer's memory: shape (nbytes,), dtype uint8; its block comes back with the last reference, in any thread."""

    # set only in the memory itself, not in the views of it that numpy makes
    home: Blocks | None = None
    block: mmap.mmap

    def __del__(self) -> None:
        if self.home is not None:
            self.home.keep(self.block)


class Blocks:
    """Lends memory, and keeps up to ``most_bytes`` of returned blocks; calls ``changed`` if ``nbytes`` changes."""

    # without a lock: the garbage collector may return memory in any thread, and ``changed`` is called there

    def __init__(self, most_bytes: int, changed: Callable[[], None]) -> None:
        self._most_bytes, self._changed = most_bytes, changed
        self._kept: deque[mmap.mmap] = deque()

    @property
    def nbytes(self) -> int:
        """Bytes that are kept."""
        return sum(map(len, tuple(self._kept)))

    def take(self, nbytes: int) -> Memory:
        """Return ``nbytes`` of memory, not cleared."""
        if nbytes < _SMALLEST_BYTES:
            return Memory(nbytes, np.uint8)
        size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        for block in tuple(self._kept):
            if len(block) == size:
                with contextlib.suppress(ValueError):  # another thread was faster
                    self._kept.remove(block)
                    break
        else:
            block = _map(size)
        # numpy makes a block the base of its memory, and the memory that of its arrays, since their types differ
        memory: Any = np.ndarray.__new__(Memory, (nbytes,), np.uint8, block)
        memory.block, memory.home = block, self
        return memory

    def keep(self, block: mmap.mmap) -> None:
        """Keep a returned block."""
        if len(block) <= self._most_bytes:
            self._kept.append(block)
            self.shrink(self._most_bytes)

    def shrink(self, most_bytes: int) -> None:
        """Free kept blocks, the oldest first, until at most ``most_bytes`` are left."""
        if self._kept:
            while self._kept and self.nbytes > most_bytes:
                with contextlib.suppress(IndexError):  # another thread was faster
                    self._kept.popleft()
            self._changed()


def result_like(ufunc: np.ufunc, inputs: Sequence[Any]) -> np.ndarray | None:
    """Return an untouched array with the dtype, shape and strides of a large result; None: numpy makes the result."""
    large = any(isinstance(x, np.ndarray) and x.nbytes >= _SMALLEST_BYTES for x in inputs)
    if not (large and _NUMPY_2) or ufunc.nout != 1 or ufunc.signature is not None:
        return None
    operands: list[Any] = [*inputs, None]
    flags: list[Any] = [*[["readonly"]] * len(inputs), ["writeonly", "allocate"]]
    kinds = [x.dtype if isinstance(x, (np.ndarray, np.generic)) else type(x) for x in inputs]
    try:
        dtype = ufunc.resolve_dtypes((*kinds, None))[-1]
        result = np.nditer(operands, ["zerosize_ok"], flags, [*[None] * len(inputs), dtype], order="K").operands[-1]
    except (TypeError, ValueError):  # not for this ufunc, or the inputs do not fit: numpy's own error comes then
        return None
    return result if dtype.char in NUMBERS else None


def _map(size: int) -> mmap.mmap:
    try:
        block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as e:
        raise MemoryError(f"{size} bytes of host memory cannot be mapped: {e.strerror}") from e
    with contextlib.suppress(OSError):  # a kernel without huge pages
        block.madvise(mmap.MADV_HUGEPAGE)
    return block


def root_of(array: np.ndarray) -> np.ndarray:
    """Return the array that owns an array's memory."""
    base = array.base
    while base is not None:
        if isinstance(base, np.ndarray):
            array = base
        # np.lib.stride_tricks puts an object of its own between a view and its array (numpy 2.4)
        base = getattr(base, "base", None)
    return array


def bytes_of(root: np.ndarray) -> np.ndarray:
    """Return the memory of an owner as bytes; it is contiguous in some order of axes."""
    order = sorted(range(root.ndim), key=lambda axis: -root.strides[axis])
    return root.transpose(order).reshape(-1).view(np.uint8)


def map_usage(path: str | os.PathLike[str]) -> mmap.mmap:
    """Make a file of one number: the host memory that other processes leave out, read by :func:`read_usage_bytes`."""
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600), "w+b") as f:
        f.write(bytes(COUNTER_BYTES))
        f.flush()
        return mmap.mmap(f.fileno(), COUNTER_BYTES)


def read_usage_bytes(path: str | os.PathLike[str]) -> int:
    """Return the host memory that a simulated GPU of another process takes; 0 without such a file."""
    try:
        return int.from_bytes(Path(path).read_bytes(), "little")
    except OSError:
        return 0


def _part(name: str) -> property:
    """Return the property of the real or imaginary part: an array of the device, for complex numbers a view."""
    return property(
        lambda self: self._up(getattr(self._host, name)), lambda self, value: setattr(self._host, name, _down(value))
    )


class SimArray(np.lib.mixins.NDArrayOperatorsMixin):
    """An array on a simulated GPU; :meth:`SimGpu.asarray` makes one, and so do computations."""

    __slots__ = ("__weakref__", "_allocation", "_host")
    __array_priority__ = 100

    def __init__(self, host: np.ndarray, allocation: Any) -> None:
        self._host, self._allocation = host, allocation  # its memory; its hpcgpu.sim.gpu.Allocation

    @property
    def __hpcgpu_device__(self) -> Any:
        """The device, under the name that the spill store reads."""
        return self._allocation.gpu

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape; may be set."""
        return self._host.shape

    @shape.setter
    def shape(self, shape: int | tuple[int, ...]) -> None:
        self._host.shape = shape

    @property
    def dtype(self) -> np.dtype:
        """Its dtype."""
        return self._host.dtype

    @property
    def ndim(self) -> int:
        """Its number of axes."""
        return self._host.ndim

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return self._host.nbytes

    @property
    def base(self) -> SimArray | None:
        """The array of which this is a view, or None; as with CuPy, also after a move down and up."""
        base = self._host.base
        while base is not None and type(base) is not np.ndarray:  # Memory, or as in root_of
            base = getattr(base, "base", None)
        return None if base is None else SimArray(base, self._allocation)

    real, imag = map(_part, ("real", "imag"))

    def get(self, *, order: Literal["C", "F", "A"] = "C") -> np.ndarray:
        """Copy to the host, as CuPy's ``get``."""
        return self._allocation.gpu.to_host(self._host, order)

    def tolist(self) -> Any:  # nested lists, or one number
        """Copy to the host, as Python's numbers."""
        return self.get().tolist()

    def tobytes(self) -> bytes:
        """Copy to the host, as bytes."""
        return self.get().tobytes()

    def item(self, *args: int) -> Any:  # a number of the array's kind
        """Copy one element to the host."""
        return self.get().item(*args)

    def __array__(self, *_: object, **__: object) -> np.ndarray:
        raise TypeError(_IMPLICIT)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        out = kwargs.get("out", ())
        if any(not isinstance(o, SimArray) for o in out if o is not None):
            raise TypeError(_IMPLICIT)
        others = (x for x in inputs if not isinstance(x, (SimArray, np.ndarray, np.generic)))
        if any(hasattr(type(x), "__array_ufunc__") for x in others):  # such as dask's arrays, which handle ours
            return NotImplemented
        hosts = [_down(x) for x in inputs]
        if method == "__call__" and not kwargs and (like := result_like(ufunc, hosts)) is not None:
            made = self._allocation.gpu.empty_as(like)
            ufunc(*hosts, out=made._host)
            return made
        result = getattr(ufunc, method)(*hosts, **_down(kwargs))
        if len(out) == 1:
            return out[0]
        return self._up(result)

    def __array_function__(self, function: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
        if not all(issubclass(t, (SimArray, np.ndarray)) for t in types):
            return NotImplemented
        if function in _UPLOADS and not isinstance(args[0], SimArray):
            return self._allocation.gpu.asarray(function(*args, **kwargs))
        if function in _OUTPUT:
            args, kwargs = [_to_host(a) for a in args], {k: _to_host(a) for k, a in kwargs.items()}
            return function(*args, **kwargs)
        host = function in _INDEXED
        result = function(*_down(args, host), **_down(kwargs, host))
        return result if function in _FACTS else self._up(result)

    def __getitem__(self, index: Any) -> Any:
        return self._up(self._host[_down(index, host=True)])

    def __setitem__(self, index: Any, value: Any) -> None:
        self._host[_down(index, host=True)] = _down(value)

    def __len__(self) -> int:
        return len(self._host)

    def __iter__(self) -> Any:
        return (self[i] for i in range(len(self)))

    def __bool__(self) -> bool:
        return bool(self.item() if self.size == 1 else self._host)

    def __int__(self) -> int:
        return int(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __complex__(self) -> complex:
        return complex(self.item())

    def __index__(self) -> int:
        return int(self.get().__index__())

    def __repr__(self) -> str:
        return f"SimArray({self.get()!r})"

    def __getattr__(self, name: str) -> Any:  # the attribute of numpy's array
        if name.startswith("__") or name not in _ATTRIBUTES:
            raise AttributeError(f"'SimArray' object has no attribute {name!r}")
        value = getattr(self._host, name)
        if not callable(value):
            return self._up(value)

        def method(*args: Any, **kwargs: Any) -> Any:
            return self._up(value(*_down(args, name == "take"), **_down(kwargs)))

        return method

    def __reduce__(self) -> tuple[Callable[[np.ndarray], SimArray], tuple[np.ndarray]]:
        return self._allocation.gpu.asarray, (self.get(order="A"),)  # another process reads it to its own GPU

    def __copy__(self) -> SimArray:
        return self.copy()

    def __deepcopy__(self, _: object) -> SimArray:
        return self.copy()

    def __dask_tokenize__(self) -> tuple[object, ...]:
        return "SimArray", self.shape, self.dtype.str, hashlib.sha1(self.tobytes()).hexdigest()

    def _up(self, result: Any) -> Any:
        """Return the result of a computation as device arrays."""
        if isinstance(result, np.ndarray):
            return SimArray(result, self._allocation.gpu.allocation_of(result))
        if isinstance(result, np.generic):
            return self._up(np.asarray(result))
        if isinstance(result, tuple) and hasattr(result, "_fields"):
            return type(result)(*map(self._up, result))
        if isinstance(result, (list, tuple)):
            return type(result)(map(self._up, result))
        return result


def host_of(array: SimArray) -> np.ndarray:
    """Return the numpy array behind a device array; not an attribute, since CuPy's arrays have none."""
    return array._host


def buffer_of(array: SimArray) -> Any:
    """Return an array's hpcgpu.sim.gpu.Allocation."""
    return array._allocation


def _down(value: Any, host: bool = False) -> Any:
    """Return a computation's arguments for numpy; host arrays are allowed only as indices."""
    if isinstance(value, SimArray):
        return value._host
    if isinstance(value, np.ndarray) and not host:
        raise TypeError(f"Unsupported type {type(value)}: an array of the host and one of the device do not mix")
    if isinstance(value, (list, tuple)):
        if hasattr(value, "_fields"):
            return type(value)(*(_down(v, host) for v in value))
        return type(value)(_down(v, host) for v in value)
    if isinstance(value, Mapping):
        return {k: _down(v, host) for k, v in value.items()}
    return value


def _to_host(value: Any) -> Any:
    return value.get() if isinstance(value, SimArray) else value
