"""cuda.bindings and cuda.core on a stand-in for NVIDIA's driver: the tests of a GPU, except those with a kernel."""

from __future__ import annotations

from pathlib import Path

import fake_cuda
import pytest


def test_what_the_store_asks_of_driver_and_cuda_core(tmp_path: Path) -> None:
    pytest.importorskip("cuda.core", reason="no cuda.core here: it comes with the extra dev")
    # one child for all of them: a process has one driver, and most of the time is that of imports
    files = ["spill/test_cuda_api.py", "spill/test_cuda_standin.py"]
    assert fake_cuda.not_passed(tmp_path, files, "-n", "0") == []
