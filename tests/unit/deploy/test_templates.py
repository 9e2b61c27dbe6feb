"""The templates are what the code renders, byte for byte; ``pytest --update-golden`` writes them anew."""

from __future__ import annotations

import os

import pytest
from paths import ROOT

from hpcgpu.deploy.start import TEMPLATES, render_template

FOLDER = ROOT / "jobscripts"


@pytest.mark.parametrize("name", TEMPLATES)
def test_bytes(name: str) -> None:
    path = FOLDER / name
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(render_template(name))
    assert path.read_bytes() == render_template(name).encode()
    assert path.stat().st_mode & 0o100


def test_no_other_template() -> None:
    assert {p.name for p in FOLDER.iterdir()} == set(TEMPLATES)
