"""Unix sockets at paths longer than the kernel's 107 bytes, as in the TMPDIR of some sites."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

_NAME_BYTES = 107  # of sockaddr_un, without the last NUL (unix(7))


@contextlib.contextmanager
def address(path: str) -> Iterator[str]:
    """Yield an address of ``path`` for bind or connect; raise FileNotFoundError if its folder does not exist."""
    if len(os.fsencode(path)) <= _NAME_BYTES:
        yield path
        return
    folder, name = os.path.split(path)
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{name}"
    finally:
        os.close(fd)
