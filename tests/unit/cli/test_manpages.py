"""The script that writes manual pages: where they lie is what the documentation says, and they have the examples."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from types import ModuleType

import click
import pytest
from paths import ROOT

from hpcgpu.cli.commands import hpcgpu


@pytest.fixture
def pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that the script has written to; click-man, which only ``make docs`` installs, writes headings here."""

    def write_man_pages(name: str, command: click.Command, *, version: str, target_dir: str) -> None:
        Path(target_dir, f"{name}.1").write_text(f".TH {name} {version}\n")
        for below, each in getattr(command, "commands", {}).items():
            write_man_pages(f"{name}-{below}", each, version=version, target_dir=target_dir)

    core = ModuleType("click_man.core")
    core.write_man_pages = write_man_pages  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "click_man", ModuleType("click_man"))
    monkeypatch.setitem(sys.modules, "click_man.core", core)
    assert runpy.run_path(str(ROOT / "scripts/manpages.py"))["main"](tmp_path / "man") == 0
    return tmp_path / "man"


def test_pages_lie_where_man_looks_for_them(pages: Path) -> None:
    found = {path.relative_to(pages).as_posix() for path in pages.rglob("*.1")}
    assert {"man1/hpcgpu.1", "man1/hpcgpu-run.1", "man1/hpcgpu-site-check.1"} <= found
    assert all(name.startswith("man1/") for name in found)
    said = (ROOT / "docs/how-to/command-line.md").read_text()
    assert "`build/man/man1`" in said
    assert "scripts/manpages.py build/man\n" in (ROOT / "Makefile").read_text()


@pytest.mark.parametrize("page", ["hpcgpu", "hpcgpu-run", "hpcgpu-site", "hpcgpu-site-check"])
def test_pages_have_the_examples(page: str, pages: Path) -> None:
    command: click.Command = hpcgpu
    for name in page.split("-")[1:]:
        assert isinstance(command, click.Group)
        command = command.commands[name]
    text = (pages / "man1" / f"{page}.1").read_text().replace("\\-", "-")
    assert [line for line in command.examples if line not in text] == []  # type: ignore[attr-defined]
