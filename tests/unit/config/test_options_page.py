"""The page of all options is current."""

from __future__ import annotations

import os

import options_page
from paths import ROOT

from hpcgpu.model.settings import options, user_name

PAGE = ROOT / "docs/reference/options.md"


def test_the_page_is_current() -> None:
    """``--update-golden`` writes it; read the difference."""
    text = options_page.render()
    if os.environ.get("UPDATE_GOLDEN"):
        PAGE.write_text(text)
    assert PAGE.read_text() == text


def test_every_option_is_there_with_all_its_names() -> None:
    text = PAGE.read_text()
    for f in options():
        name = user_name(f)
        assert text.count(f"### `{name}`\n") == 1
        assert f"`--{name.replace('_', '-')}`" in text
        assert f"`HPCGPU_{name.upper()}`" in text
        assert all(f"`{alias}`" in text for alias in f.metadata["aliases"])
