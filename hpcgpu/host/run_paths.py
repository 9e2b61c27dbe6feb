"""Where programs and libraries look for libraries (RPATH and RUNPATH of ELF files): within a copy of their folder."""

from __future__ import annotations

import os
import struct

MAGIC = b"\x7fELF\x02\x01"  # 64 bits, little endian: x86-64, arm64, ppc64le
_LOAD, _DYNAMIC = 1, 2
_STRINGS, _PATHS = 5, (15, 29)  # DT_STRTAB; DT_RPATH and DT_RUNPATH (elf(5))


def relocated(data: bytes, path: str, roots: tuple[str, ...]) -> bytes:
    """Return an ELF file's content with folders below ``roots`` relative to it; other content as it is.

    As chrpath does it, in place. The end of a longer old text stays: it may be the name of a symbol, too.
    """
    if not data.startswith(MAGIC):
        return data
    try:
        spans = list(_run_paths(data))
    except (struct.error, ValueError):
        return data
    changed = bytearray(data)
    for start, end in spans:
        old = data[start:end].decode(errors="surrogateescape")
        new = ":".join(_relative(folder, path, roots) for folder in old.split(":")).encode(errors="surrogateescape")
        if len(new) < end - start:
            changed[start : start + len(new) + 1] = new + b"\0"
    return bytes(changed)


def _relative(folder: str, path: str, roots: tuple[str, ...]) -> str:
    inside = any(folder == root or folder.startswith(f"{root}/") for root in roots)
    return f"$ORIGIN/{os.path.relpath(folder, os.path.dirname(path))}" if inside else folder


def _run_paths(data: bytes) -> list[tuple[int, int]]:
    """Return where the run paths lie in a file."""
    (offset,), (size, count) = struct.unpack_from("<Q", data, 32), struct.unpack_from("<HH", data, 54)
    # type, flags, offset, address, physical address, size in the file (elf(5), Elf64_Phdr)
    headers = [struct.unpack_from("<IIQQQQ", data, offset + at * size) for at in range(count)]
    tags: list[tuple[int, int]] = []
    for kind, _, start, _, _, nbytes in headers:
        if kind == _DYNAMIC:
            tags += struct.iter_unpack("<qQ", data[start : start + nbytes - nbytes % 16])
    table = next((value for tag, value in tags if tag == _STRINGS), 0)
    at = [
        start + table - address
        for kind, _, start, address, _, n in headers
        if kind == _LOAD and 0 <= table - address < n
    ]
    begins = [at[0] + value for tag, value in tags if tag in _PATHS and at]
    return [(begin, data.index(b"\0", begin)) for begin in begins]
