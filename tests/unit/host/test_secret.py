"""The user's secret, and names that nobody else can take beforehand."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path

import pytest
from shared_host import NEIGHBOUR, as_neighbour, by_root
from waiting import aside, scaled

from hpcgpu.errors import HpcGpuError
from hpcgpu.host.private import hidden_name, user_secret


def test_processes_that_start_together_share_a_private_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    found = {future.result(scaled(30)) for future in [aside(user_secret) for _ in range(16)]}
    assert len(found) == 1
    (path,) = (tmp_path / ".hpcgpu/user").iterdir()
    assert path.read_text() in found
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)


def test_secret_name_differs_between_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = []
    for home in ("alice", "bob", "alice"):
        (tmp_path / home).mkdir(exist_ok=True)
        monkeypatch.setenv("HOME", str(tmp_path / home))
        names.append(hidden_name("launch", "GPU-1", 0))
    assert names[0] == names[2] != names[1]
    assert hidden_name("launch", "GPU-1", 1) not in names
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as mark:
        mark.bind(names[0])  # the kernel takes it


@pytest.mark.parametrize("home", ["/proc/none", "shared"])
def test_without_a_private_folder_it_is_said_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str
) -> None:
    folder = tmp_path / home  # /proc/none stays itself
    monkeypatch.setenv("HOME", str(folder))
    if home == "shared":
        (folder / ".hpcgpu/user").mkdir(parents=True)
        (folder / ".hpcgpu/user").chmod(0o777)
    with pytest.raises(HpcGpuError, match=r"HOME must be a folder of yours|chmod 700"):
        user_secret()


@by_root
def test_another_user_cannot_be_there_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launch, GPU and number can be guessed, and where the secret lies is known."""
    with tempfile.TemporaryDirectory(dir="/tmp") as shared:  # a test's own folders are closed to a neighbour
        mine, theirs, told = (Path(shared) / name for name in ("mine", "theirs", "told"))
        Path(shared).chmod(0o1777)
        mine.mkdir(mode=0o755)
        monkeypatch.setenv("HOME", str(mine))
        name = hidden_name("launch", "GPU-1", 0)
        secret = mine / ".hpcgpu" / "user" / "secret"
        assert secret.stat().st_uid != NEIGHBOUR

        def guess() -> None:
            with pytest.raises(PermissionError):
                secret.read_text()
            theirs.mkdir(mode=0o700)
            os.environ["HOME"] = str(theirs)
            told.write_bytes(hidden_name("launch", "GPU-1", 0).encode())

        as_neighbour(guess)
        guessed = told.read_bytes().decode()
        assert guessed.startswith("\0hpcgpu-")
        assert guessed != name
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as neighbours,
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ours,
        ):
            neighbours.bind(guessed)
            ours.bind(name)
