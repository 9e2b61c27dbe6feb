"""Whose modules a run imports, of those that lie in the folder in which it is started."""

from __future__ import annotations

import subprocess
from pathlib import Path

import ranks
from waiting import scaled

SCRIPT = """
from distributed import Client
def found():
    import importlib.util
    return importlib.util.find_spec("mine") is not None
with Client() as client:
    print("worker found:", client.submit(found).result())
"""


def run(folder: Path, script: Path) -> subprocess.CompletedProcess[str]:
    argv = [f"{ranks.BIN}/hpcgpu", "run", "--gpus", "sim:1", "--no-dashboard", str(script)]
    return subprocess.run(argv, cwd=folder, env=ranks.environment(), capture_output=True, text=True, timeout=scaled(90))


def test_what_anybody_may_have_put_there_is_not_imported(tmp_path: Path) -> None:
    shared, own = tmp_path / "shared", tmp_path / "own"
    shared.mkdir()
    shared.chmod(0o1777)
    own.mkdir()
    (own / "script.py").write_text(SCRIPT)
    for name in ("dask", "distributed", "numpy", "msgspec", "hpcgpu", "cupy", "mine"):
        (shared / f"{name}.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'a').write('{name} ')")
    done = run(shared, own / "script.py")
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "imported").exists(), (tmp_path / "imported").read_text()
    assert "worker found: False" in done.stdout
    assert f"modules in {shared} are not imported: all users may write there" in done.stderr


def test_the_users_own_are_found_by_the_workers(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "mine.py").write_text("")
    done = run(tmp_path, tmp_path / "script.py")
    assert "worker found: True" in done.stdout, done.stderr
    assert "not found" not in done.stderr
