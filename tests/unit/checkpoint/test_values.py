"""Values in frames: bit for bit, and without a GPU those of one as NumPy's."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from hpcgpu.checkpoint import values
from hpcgpu.spill.devices.cuda import CudaDevice
from hpcgpu.spill.devices.libraries import ArrayView
from hpcgpu.spill.store.handles import Packed
from hpcgpu.spill.values.take_apart import Slot

# NumPy pickles dates of the other byte order as dates of this machine's (numpy 2): equal, not bit for bit
KINDS = arrays.boolean_dtypes() | arrays.integer_dtypes() | arrays.floating_dtypes() | arrays.complex_number_dtypes()
ANY = arrays.arrays(KINDS | arrays.unicode_string_dtypes(), arrays.array_shapes(min_dims=0, min_side=0))


def copied(frames: list[memoryview]) -> list[Any]:
    return [np.frombuffer(bytearray(frame), np.uint8) for frame in frames]


@given(ANY, st.booleans())
def test_array_in_frames_comes_back_bit_for_bit(array: np.ndarray, turned: bool) -> None:
    array = array.T if turned else array
    again = values.from_frames(copied(values.to_frames({"a": [array]})))["a"][0]
    assert (again.dtype, again.shape, again.tobytes()) == (array.dtype, array.shape, array.tobytes())
    assert again.flags.writeable


class OnGpu:
    """Pickled as the device of a GPU."""

    def __reduce__(self) -> tuple[Callable[[int], CudaDevice], tuple[int]]:
        return CudaDevice.current, (0,)


def test_packed_array_of_a_gpu_is_numpys_without_one() -> None:
    root = np.arange(6, dtype="i4").view("u1")
    view = ArrayView("cupy", (2, 2), np.dtype("i4"), (8, 4), 4)
    packed = Packed(Slot(0), ((0, 0, np.ndarray),), ((OnGpu(), root, [view]),))  # type: ignore[arg-type]
    with mock.patch.object(values, "has_gpu", lambda: False):
        array = values.from_frames(copied(values.to_frames(packed))).unpack()
    assert type(array) is np.ndarray
    assert array.tolist() == [[1, 2], [3, 4]]


def test_pickled_array_of_cupy_is_numpys_without_a_gpu() -> None:
    # the pickle of an array of CuPy: a call of its array() with one of NumPy
    pickled = b"\x80\x05ccupy._core.core\narray\n" + pickle.dumps((np.arange(3),), 5)[2:-1] + b"R."
    with mock.patch.object(values, "has_gpu", lambda: False):
        assert values.from_frames([pickled]).tolist() == [0, 1, 2]
    with mock.patch.object(values, "has_gpu", lambda: True), pytest.raises(ModuleNotFoundError, match="cupy"):
        values.from_frames([pickled])
