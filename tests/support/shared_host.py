"""A host with other users, played on this one: folders that all share, and ``/dev/shm``, of a test alone."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ranks

NEIGHBOUR = 54321
by_root = pytest.mark.skipif(os.getuid() != 0, reason="a second user of this host can be played by root only")


@dataclass(frozen=True)
class Place:
    """Folders that all users of a host share, and what one of them has for himself."""

    tmp: Path
    spill: Path
    shm: Path
    home: Path

    @property
    def shared(self) -> tuple[Path, ...]:
        return (self.tmp, self.spill, self.shm)

    def start(self, argv: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """Start something that has these folders; its ``/dev/shm`` is a mount that nobody else has."""
        script = 'mount --bind "$0" /dev/shm && exec "$@"'
        argv = ["unshare", "--mount", "sh", "-c", script, str(self.shm), *argv]
        options |= {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "text": True}
        return subprocess.Popen(argv, env=ranks.environment(TMPDIR=str(self.tmp), HOME=str(self.home)), **options)

    def run(self, argv: Sequence[str], timeout: float = 90) -> tuple[int, str, str]:
        """Return exit code, output and errors of something that has these folders."""
        with self.start(argv, stderr=subprocess.PIPE) as process:
            try:
                out, err = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        return process.returncode, out, err


@pytest.fixture
def shared_place() -> Iterator[Place]:
    """Make the folders; as root, for nobody else may mount something."""
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("this container may not mount anything (unshare --mount)")
    above = Path(tempfile.mkdtemp(dir="/tmp"))  # a test's own folders are closed to a neighbour
    above.chmod(0o755)
    place = Place(*(above / name for name in ("tmp", "spill", "shm", "home")))
    for folder in place.shared:
        folder.mkdir()
        folder.chmod(0o1777)
    place.home.mkdir(mode=0o700)
    try:
        yield place
    finally:
        shutil.rmtree(above)


def as_neighbour(act: Callable[[], object]) -> None:
    """Have somebody else do something, and wait for it."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setgroups([])
            os.setresgid(NEIGHBOUR, NEIGHBOUR, NEIGHBOUR)
            os.setresuid(NEIGHBOUR, NEIGHBOUR, NEIGHBOUR)
            os.umask(0)
            act()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
