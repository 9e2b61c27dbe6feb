"""What a person reads about a process, thread or file that the kernel refuses."""

import errno

import pytest

from hpcgpu.host import process


@pytest.mark.parametrize(
    ("error", "part"),
    [
        (RuntimeError("can't start new thread"), "(ulimit -u)"),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), "(ulimit -u)"),
        (PermissionError(errno.EACCES, "Permission denied", "/home/me/run"), "a folder that you can write to"),
        (OSError(errno.ENOSPC, "No space left on device"), "a folder that you can write to"),
    ],
)
def test_a_refusal_has_a_text_that_says_what_to_do(error: Exception, part: str) -> None:
    assert part in process.refused(error)
    assert str(error) in process.refused(error)


def test_a_port_that_needs_root_is_not_taken_for_a_file() -> None:
    assert process.refused(PermissionError(errno.EACCES, "Permission denied")) == ""
