"""Values in frames: bit for bit, and without a GPU those of one as NumPy's."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from hpcgpu.checkpoint import values
from hpcgpu.errors import ConfigError
from hpcgpu.spill.devices.cuda import CudaDevice
from hpcgpu.spill.devices.libraries import ArrayView, BytesView
from hpcgpu.spill.devices.pools import TensorView
from hpcgpu.spill.store.handles import Packed
from hpcgpu.spill.values.take_apart import Slot

# NumPy pickles dates of the other byte order as dates of this machine's (numpy 2): equal, not bit for bit
KINDS = arrays.boolean_dtypes() | arrays.integer_dtypes() | arrays.floating_dtypes() | arrays.complex_number_dtypes()
KINDS |= arrays.byte_string_dtypes() | arrays.datetime64_dtypes(endianness="=")
ANY = arrays.arrays(
    KINDS | arrays.unicode_string_dtypes() | arrays.array_dtypes(KINDS), arrays.array_shapes(min_dims=0, min_side=0)
)
NANS = st.binary(min_size=8, max_size=80).map(lambda bits: np.frombuffer(bits[: len(bits) // 8 * 8], "f8").copy())
FRAME = pd.DataFrame(
    {
        "text": pd.array(["a", None], dtype="string"),
        "kind": pd.Categorical(["x", "y"], ordered=True),
        "zoned": pd.date_range("2020", periods=2, tz="Europe/Berlin"),
        "whole": pd.array([1, None], dtype="Int64"),
        "month": pd.period_range("2020", periods=2, freq="M"),
        "object": [{"a": 1}, [2]],
        "sparse": pd.arrays.SparseArray([0, 1]),
    },
    index=pd.MultiIndex.from_tuples([("a", 1), ("b", 2)], names=["m", "n"]),
)


def copied(frames: list[memoryview]) -> list[Any]:
    return [np.frombuffer(bytearray(frame), np.uint8) for frame in frames]


@given(ANY | NANS, st.booleans())
def test_array_in_frames_comes_back_bit_for_bit(array: np.ndarray, turned: bool) -> None:
    array = array.T if turned else array
    again = values.from_frames(copied(values.to_frames({"a": [array]})))["a"][0]
    assert (again.dtype, again.shape, again.tobytes()) == (array.dtype, array.shape, array.tobytes())
    assert again.flags.writeable


@pytest.mark.parametrize("value", [FRAME, FRAME["kind"], FRAME.index.to_frame()], ids=["frame", "series", "index"])
def test_frame_in_frames_comes_back_with_its_types(value: Any) -> None:
    again = values.from_frames(copied(values.to_frames(value)))
    equal = pd.testing.assert_frame_equal if isinstance(value, pd.DataFrame) else pd.testing.assert_series_equal
    equal(again, value)


def test_masked_and_object_arrays_come_back() -> None:
    masked = np.ma.masked_array([1, 2, 3], mask=[0, 1, 0], fill_value=7)
    objects = np.array([1, "a", None, {"b": [1]}], dtype=object)
    again, others = values.from_frames(copied(values.to_frames([masked, objects])))
    assert (again.data.tolist(), again.mask.tolist(), again.fill_value) == ([1, 2, 3], [False, True, False], 7)
    assert (others.dtype, others.tolist()) == (objects.dtype, objects.tolist())


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


def test_without_a_gpu_buffers_are_bytes_and_tensors_refused() -> None:
    root = np.arange(6, dtype="u1")
    assert values.NumpyDevice.unpack(root, [BytesView("rmm", 4)])[0].tolist() == [0, 1, 2, 3]
    with pytest.raises(ConfigError, match=r"objects of torch, .* no GPU for them on .*: load it where"):
        values.NumpyDevice.unpack(root, [TensorView((6,), "uint8", (1,), 0, False, False)])
