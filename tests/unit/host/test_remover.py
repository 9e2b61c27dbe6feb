"""The remover of a run's folder: trees with links, and the modules that it imports."""

import subprocess
import sys
from pathlib import Path

from hpcgpu.host import remover


def test_tree_is_removed_with_its_links_but_not_their_targets(tmp_path: Path) -> None:
    top, other = tmp_path / "top", tmp_path / "other"
    (top / "a" / "b").mkdir(parents=True)
    other.mkdir()
    for file in (top / ".lock", top / "a" / ".lock", top / "a" / "file", other / "file"):
        file.write_text("")
    (top / "a" / "folder").symlink_to(other)
    (top / "dead").symlink_to("nowhere")
    remover.remove_tree(str(top), spared=".lock")
    assert list(top.iterdir()) == [top / ".lock"], "the lock goes last"
    remover.remove_tree(str(top))
    remover.remove_tree(str(top))  # another process has removed it
    assert list(tmp_path.iterdir()) == [other]
    assert list(other.iterdir()) == [other / "file"]


def imported(*argv: str) -> set[str]:
    """Return the modules that a Python without site-packages imports."""
    command = [sys.executable, "-I", "-S", "-X", "importtime", *argv]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}


def test_remover_imports_few_modules(tmp_path: Path) -> None:
    brought = imported(remover.__file__, str(tmp_path / "no lock")) - imported("-c", "import os")
    assert brought <= {"__future__", "fcntl"}, "each is look-ups on each node"
