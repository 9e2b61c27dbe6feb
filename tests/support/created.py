"""What is made in folders while something runs, however short its life is: inotify(7)."""

from __future__ import annotations

import ctypes
import os
import struct
from pathlib import Path
from types import TracebackType
from typing import Self

_IN_MOVED_TO, _IN_CREATE = 0x80, 0x100
_HEAD = struct.Struct("iIII")


class Created:
    """The names that appear in folders, by folder; used as a context manager around what makes them."""

    def __init__(self, *folders: Path) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._file = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        self._folders = {self._add(folder): folder for folder in folders}
        self.names: dict[Path, set[str]] = {folder: set() for folder in folders}

    def _add(self, folder: Path) -> int:
        number = self._libc.inotify_add_watch(self._file, os.fsencode(folder), _IN_CREATE | _IN_MOVED_TO)
        if number < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(folder))
        return int(number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            while events := os.read(self._file, 1 << 16):
                self._note(events)
        except BlockingIOError:
            os.close(self._file)

    def _note(self, events: bytes) -> None:
        at = 0
        while at < len(events):
            number, mask, _, length = _HEAD.unpack_from(events, at)
            assert number >= 0, f"events were lost: {mask:#x}"
            at += _HEAD.size + length
            name = os.fsdecode(events[at - length : at].rstrip(b"\0"))
            self.names[self._folders[number]].add(name)
