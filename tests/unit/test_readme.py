"""Every command of the README is tried somewhere."""

from __future__ import annotations

from pages import LINES


def test_every_door_is_tried() -> None:
    tried = ("make ", ". .venv/bin/activate", "sbatch ", "hpcgpu launch ", "mpirun ", "hpcgpu run ", "pip install ")
    assert [text for text in LINES if text and not text.startswith(tried)] == []
