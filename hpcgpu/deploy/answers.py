"""Texts that several nodes print into one stream: as lines that stay whole, and together again."""

from __future__ import annotations

import base64
import binascii
import secrets
import zlib
from collections.abc import Iterable

_MARK = "hpcgpu-answer"
# srun passes a longer line on in pieces of 1,024 bytes, other nodes' pieces between them (Slurm 22.05, seen
# with lines of 7 kB). Open MPI passes on what it finds, up to 4,096 bytes: a multiple of this.
LINE_BYTES = 512
_PAYLOAD = 448


def lines(text: str) -> list[str]:
    """Return a text as lines of ``LINE_BYTES`` each, with their line ends; write each by one call."""
    packed = base64.b64encode(zlib.compress(text.encode())).decode()
    pieces = [packed[i : i + _PAYLOAD] for i in range(0, len(packed), _PAYLOAD)]
    name = secrets.token_hex(8)
    said = (f"{_MARK} {name} {number} {len(pieces)} {piece}" for number, piece in enumerate(pieces))
    return [f"{line:<{LINE_BYTES - 1}}\n" for line in said]


def texts(stream: Iterable[str]) -> list[str]:
    """Return the texts whose lines are in a stream, in any order, with others between them.

    Raises
    ------
    ValueError
        Lines of a text are missing or changed.

    """
    found: dict[str, dict[int, str]] = {}
    counts: dict[str, int] = {}
    for line in stream:
        if line.startswith(_MARK + " "):
            _, name, number, count, piece = line.split()
            found.setdefault(name, {})[int(number)] = piece
            counts[name] = int(count)
    for name, pieces in found.items():
        if len(pieces) != counts[name]:
            raise ValueError(f"of {counts[name]} lines of an answer {len(pieces)} have come")
    joined = ("".join(pieces[i] for i in range(len(pieces))) for pieces in found.values())
    try:
        return [zlib.decompress(base64.b64decode(text, validate=True)).decode() for text in joined]
    except (KeyError, binascii.Error, zlib.error) as e:
        raise ValueError(f"an answer has changed on its way ({e})") from e
