"""Words, tables and frames: the bytes on a connection of node_copies.

A word has 8 bytes: the kind in the highest one, a number in the others. ``Word.PLAIN`` is 0: there it is the first word
of a message of distributed, so a peer without this module, such as a laptop's client, sees nothing else. A table has an
address and a size for each frame of a message. Frames without an address follow it, and are never one piece.
"""

from __future__ import annotations

import itertools
import operator
import struct
from collections.abc import Iterable, Iterator
from enum import IntEnum

import numpy as np
from distributed.comm import tcp
from tornado.iostream import IOStream

from hpcgpu.host import peer_memory

THRESHOLD_BYTES = 64 * 1024  # a message with fewer bytes goes by the connection as a whole
SMALL_BYTES = 16 * 1024  # a smaller frame of a larger message goes by the connection, which is as fast for it
LOOP_FRAMES = 64  # at most so many frames are handled before others have their turn, in about 1 ms
CUT_BYTES = 1 << 20  # large frames that cannot be copied go by data connections if they have as much together
PIECE_BYTES = 128 * 1024  # small frames are written together, up to so much
MOST_BYTES = 1 << 30  # of a table, and of one write
WORD = struct.Struct("=Q")
VALUE = (1 << 56) - 1
TURN_BYTES = 2 << 20  # at most so much is written before others have their turn, in about 1 ms
FRAME_BYTES = 16  # of a table: an address, or 0, and a size


class Word(IntEnum):
    """The kind of a word; the first five begin a message, and tell how its large frames go."""

    PLAIN = 0  # a message of distributed
    PACKED = 1  # a small message, in so many bytes
    INLINE = 2  # a table of so many frames, which follow all
    LENT = 3  # a table of so many frames; large ones are to be read in the sender's memory, at these addresses
    CUT = 4  # a table of so many frames; those with an address go by data connections
    RETURN = 5  # the large frames of the oldest message are no longer needed
    ANSWER = 6  # the answer to the peer's challenge is in the slot
    GRANT = 7  # the peer's slot had the answer: it may lend
    REFUSE = 8
    WANT_DATA = 9  # make data connections
    HAVE_DATA = 10  # frames may be cut


# The words that a peer may send: first those of FIRST, if it has this module. Each word here comes once: it ends the
# turn of those in the first column, and begins that of those in the second one.
FIRST = frozenset({Word.PLAIN, Word.PACKED, Word.INLINE, Word.WANT_DATA, Word.HAVE_DATA})
AFTER: dict[Word, tuple[set[Word], set[Word]]] = {
    Word.ANSWER: ({Word.ANSWER}, {Word.LENT}),
    Word.GRANT: ({Word.GRANT, Word.REFUSE}, {Word.RETURN}),
    Word.REFUSE: ({Word.GRANT, Word.REFUSE}, set()),
    Word.WANT_DATA: ({Word.WANT_DATA}, set()),
    Word.HAVE_DATA: ({Word.HAVE_DATA}, {Word.RETURN}),
}


def address_of(frame: memoryview) -> int:
    """Return where the bytes of a frame are in this process."""
    return int(np.frombuffer(frame, np.uint8).__array_interface__["data"][0])


def _readable_addresses(frames: list[memoryview]) -> list[int]:
    """Return where each frame is; 0 if it is small, or other processes cannot read it."""
    spans = {i: (address_of(f), f.nbytes) for i, f in enumerate(frames) if f.nbytes >= SMALL_BYTES}
    if not peer_memory.are_readable(list(spans.values())):  # in few calls
        spans = {i: span for i, span in spans.items() if peer_memory.are_readable([span])}
    return [spans[i][0] if i in spans else 0 for i in range(len(frames))]


def word(kind: Word, value: int = 0) -> bytes:
    """Return the bytes of a word."""
    return WORD.pack(kind << 56 | value)


def _pieces(frames: Iterable[memoryview]) -> Iterator[memoryview | bytes]:
    """Yield frames for a stream: small ones together, and of very large ones a part."""
    small: list[memoryview] = []
    nbytes = 0  # of these
    for frame in frames:
        if small and (frame.nbytes >= SMALL_BYTES or nbytes >= PIECE_BYTES):
            yield b"".join(small)
            small, nbytes = [], 0
        if frame.nbytes < SMALL_BYTES:
            small.append(frame)
            nbytes += frame.nbytes
        else:
            yield from (frame[start : start + MOST_BYTES] for start in range(0, frame.nbytes, MOST_BYTES))
    if small:
        yield b"".join(small)


# How a message goes, its frames that do not go by the connection, the pieces of what does, and its size.
Layout = tuple[Word, list[memoryview], list[memoryview | bytes], int]


def layout(way: Word, frames: list[memoryview]) -> Layout:
    """Return how a message of these frames goes, if large ones may go in such a way."""
    addresses, sizes = [0] * len(frames), [f.nbytes for f in frames]
    if way == Word.LENT:
        addresses = _readable_addresses(frames)
    elif way == Word.CUT and sum(n for n in sizes if n >= SMALL_BYTES) >= CUT_BYTES:
        addresses = [int(n >= SMALL_BYTES) for n in sizes]
    large = list(itertools.compress(frames, addresses))
    way = way if large else Word.INLINE
    inline = itertools.compress(frames, map(operator.not_, addresses))
    table = memoryview(np.array([addresses, sizes], np.uint64).T.tobytes())
    return way, large, [word(way, len(sizes)), *_pieces(itertools.chain([table], inline))], sum(sizes)


def write_in_turns(stream: IOStream) -> None:
    """Let a stream write a long message in parts, between which the event loop comes round."""
    send, left = stream.write_to_fd, TURN_BYTES

    def write_to_fd(data: memoryview) -> int:
        nonlocal left
        nbytes = send(data) if left > 0 else 0  # then tornado waits until it may write again
        left = left - nbytes if left > 0 else TURN_BYTES
        return nbytes or 0

    stream.write_to_fd = write_to_fd


async def read_inline(stream: IOStream, sizes: list[int]) -> Iterator[memoryview]:
    """Read frames that come next in a stream, small ones at once; each has memory of its own, to be freed alone."""
    frames: list[memoryview] = []
    for is_small, group in itertools.groupby(sizes, lambda nbytes: nbytes < SMALL_BYTES):
        if not is_small:
            frames += [await tcp.read_bytes_rw(stream, nbytes) for nbytes in group]
            continue
        ends = list(itertools.accumulate(group, initial=0))
        together = await tcp.read_bytes_rw(stream, ends[-1])
        frames += [memoryview(bytearray(together[start:end])) for start, end in itertools.pairwise(ends)]
    return iter(frames)
