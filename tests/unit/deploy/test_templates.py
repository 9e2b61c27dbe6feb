"""The templates are what the code renders, byte for byte; ``pytest --update-golden`` writes them anew."""

from __future__ import annotations

import os

import pytest
from paths import ROOT

from hpcgpu.deploy.templates import NAMES, render

FOLDER = ROOT / "jobscripts"


@pytest.mark.parametrize("name", NAMES)
def test_bytes(name: str) -> None:
    path = FOLDER / name
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(render(name))
    assert path.read_bytes() == render(name).encode()
    assert path.stat().st_mode & 0o100


def test_no_other_template() -> None:
    assert {p.name for p in FOLDER.iterdir()} == set(NAMES)
