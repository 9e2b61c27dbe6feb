"""``scripts/manpages.py`` writes the pages where man looks for them, with the examples."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from types import ModuleType

import click
import pytest
from commands import commands
from paths import ROOT


def test_manpages_have_all_commands_with_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """click-man, which only ``make docs`` installs, writes headings here."""

    def write_man_pages(name: str, command: click.Command, *, version: str, target_dir: str) -> None:
        Path(target_dir, f"{name}.1").write_text(f".TH {name} {version}\n")
        for below, each in getattr(command, "commands", {}).items():
            write_man_pages(f"{name}-{below}", each, version=version, target_dir=target_dir)

    core = ModuleType("click_man.core")
    core.write_man_pages = write_man_pages  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "click_man", ModuleType("click_man"))
    monkeypatch.setitem(sys.modules, "click_man.core", core)
    assert runpy.run_path(str(ROOT / "scripts/manpages.py"))["main"](tmp_path / "man") == 0
    for name, command in commands().items():
        text = (tmp_path / "man/man1" / f"{name.replace(' ', '-')}.1").read_text().replace("\\-", "-")
        assert [line for line in getattr(command, "examples", ()) if line not in text] == []
    assert "scripts/manpages.py build/man\n" in (ROOT / "Makefile").read_text()
