"""What is said to nobody stops nothing."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import scaled

from hpcgpu.host import log


class Full(io.StringIO):
    def write(self, _: str, /) -> int:
        raise OSError(28, "No space left on device")

    def isatty(self) -> bool:
        return True


def closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("stream", [None, Full(), closed()], ids=["not-there", "full", "closed"])
def test_a_script_whose_standard_error_is_gone_goes_on(
    stream: io.StringIO | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    log.say("something")
    log.flush()
    assert log.is_terminal() is isinstance(stream, Full)


OPENS = """
import os, sys
from hpcgpu.host import log
log.open_missing()
files = [os.readlink(f"/proc/self/fd/{fd}") for fd in (0, 1, 2)]
child = os.popen("readlink /proc/self/fd/2").read().strip()
open(sys.argv[1], "w").write(repr((files, child)))
print("to nobody", file=sys.stdout)
print("to nobody", file=sys.stderr)
"""


def test_what_was_closed_at_the_start_is_open_for_children_too(tmp_path: Path) -> None:
    line = f'exec "$0" -c "$1" {tmp_path}/found <&- >&- 2>&-'
    assert subprocess.run(["bash", "-c", line, sys.executable, OPENS], timeout=scaled(60)).returncode == 0
    assert (tmp_path / "found").read_text() == repr((["/dev/null"] * 3, "/dev/null"))
