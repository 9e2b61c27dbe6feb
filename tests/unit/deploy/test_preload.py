"""A plain ``dask worker`` with the spill store: what the preload changes."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpcgpu.deploy import dask_preload


def said_of(folder: Path, caplog: pytest.LogCaptureFixture) -> str:
    worker: Any = SimpleNamespace(local_directory=str(folder), name="w", data={}, plugins={})
    caplog.clear()
    with caplog.at_level(logging.WARNING, "distributed.worker.memory"):
        asyncio.run(dask_preload.dask_setup(worker))
    return caplog.text


def test_a_scratch_folder_that_others_can_change_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Dask's default, if somebody else has made ``/tmp/dask-scratch-space`` before."""
    folder = tmp_path / "dask-scratch-space"
    folder.mkdir()
    assert "is not safe" not in said_of(folder, caplog)
    folder.chmod(0o777)
    assert f"the scratch folder of worker w is not safe, {folder}: every user of this node" in said_of(folder, caplog)
    assert "--local-directory" in caplog.text
