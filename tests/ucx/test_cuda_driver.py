"""CUDA 12's cuda.bindings, and CuPy's arrays, on a driver that stands in for NVIDIA's."""

from __future__ import annotations

from pathlib import Path

import fake_cuda


def test_what_the_store_asks_of_a_driver_of_cuda_12_and_of_cupy(tmp_path: Path) -> None:
    files = ["spill/test_cuda_standin.py", "spill/test_cupy_standin.py"]
    assert fake_cuda.not_passed(tmp_path, files) == []
