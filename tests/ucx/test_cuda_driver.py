"""CUDA 12's cuda.bindings on a driver that stands in for NVIDIA's."""

from __future__ import annotations

from pathlib import Path

import fake_cuda


def test_what_the_store_asks_of_a_driver_of_cuda_12(tmp_path: Path) -> None:
    assert fake_cuda.not_passed(tmp_path, ["spill/test_cuda_standin.py"]) == []
