"""The disk tier as it is, rooms in files, and as a log of segments that is compacted, while values come and go.

A tenth of the values goes in each of 20 rounds, chosen by chance, and as many bytes come. ``dead``: how many dead bytes
the log keeps for each live one before it writes its emptiest segment again. Medians of ``--runs`` runs, in which all
come in turn: GB/s written and read back from the page cache, CPU seconds per GB written, the most bytes on disk for
each live one, bytes written again for each new one. Decision 0024 has the figures.
"""
# ruff: noqa: D102

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hpcgpu.spill.storage.disk import Disk, Stored

KIB, MIB = 1 << 10, 1 << 20
SEGMENT_BYTES = 64 * MIB
CASES = {  # sizes of values, and the live bytes
    "16 KiB": ([16 * KIB], 256 * MIB),
    "256 KiB": ([256 * KIB], 512 * MIB),
    "8 MiB": ([8 * MIB], 1024 * MIB),
    "64 MiB": ([64 * MIB], 2048 * MIB),
    "16 KiB to 64 MiB": ([16 * KIB, 256 * KIB, MIB, 8 * MIB, 64 * MIB], 2048 * MIB),
}
ROUNDS = 20


class Rooms:
    """The disk tier of hpcgpu."""

    copied_bytes = 0

    def __init__(self, folder: str) -> None:
        self._disk = Disk(folder, trusted=True)
        self._stored: dict[int, Stored] = {}

    def write(self, key: int, value: memoryview) -> None:
        self._stored[key] = self._disk.write([value])

    def read(self, key: int) -> None:
        self._disk.read(self._stored[key])

    def delete(self, key: int) -> None:
        del self._stored[key]

    def tidy(self) -> None:
        self._disk.empty_bin()
        while self._disk.has_excess:
            self._disk.shrink()

    def close(self) -> None:
        self._stored.clear()
        self._disk.close()


@dataclass(eq=False)
class Segment:
    """A file of the log: its end, and the live keys with start and size."""

    path: Path
    end: int = 0
    live_bytes: int = 0
    live: dict[int, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT)


class Log:
    """Append to the last segment; rewrite the emptiest ones."""

    def __init__(self, folder: str, dead: float) -> None:
        self._folder, self._dead = Path(folder), dead
        self._segments: list[Segment] = []
        self._where: dict[int, Segment] = {}
        self.live_bytes = self.total_bytes = self.copied_bytes = 0
        self._begin()

    def _begin(self) -> None:
        self._segments.append(Segment(self._folder / f"{time.monotonic_ns()}"))

    def write(self, key: int, value: memoryview) -> None:
        segment = self._segments[-1]
        if segment.end and segment.end + value.nbytes > SEGMENT_BYTES:
            self._begin()
            segment = self._segments[-1]
        os.pwrite(segment.fd, value, segment.end)
        segment.live[key] = segment.end, value.nbytes
        segment.end += value.nbytes
        segment.live_bytes += value.nbytes
        self.live_bytes += value.nbytes
        self.total_bytes += value.nbytes
        self._where[key] = segment

    def read(self, key: int) -> np.ndarray:
        segment = self._where[key]
        start, nbytes = segment.live[key]
        out = np.empty(nbytes, np.uint8)
        os.preadv(segment.fd, [out.data], start)
        return out

    def delete(self, key: int) -> None:
        segment = self._where.pop(key)
        _, nbytes = segment.live.pop(key)
        segment.live_bytes -= nbytes
        self.live_bytes -= nbytes
        if not segment.live and segment is not self._segments[-1]:
            self._remove(segment)

    def _remove(self, segment: Segment) -> None:
        self._segments.remove(segment)
        self.total_bytes -= segment.end
        os.close(segment.fd)
        segment.path.unlink()

    def tidy(self) -> None:
        while self.total_bytes - self.live_bytes > max(self._dead * self.live_bytes, SEGMENT_BYTES):
            emptiest = min(self._segments[:-1], key=lambda s: s.live_bytes / s.end)
            for key in list(emptiest.live):
                value = self.read(key)
                self.copied_bytes += value.nbytes
                self.delete(key)  # with the last key the segment goes
                self.write(key, value.data)

    def close(self) -> None:
        for segment in list(self._segments):
            self._remove(segment)


WHO: dict[str, Any] = {"rooms": Rooms, **{f"log, {d:g} dead": (lambda f, d=d: Log(f, d)) for d in (0.125, 0.5, 1.0)}}


def measure(make: Any, sizes: list[int], live_bytes: int, parent: str | None) -> dict[str, float]:
    """Return the figures of one case."""
    chance, data = random.Random(1), memoryview(random.Random(2).randbytes(max(sizes)))
    keys: list[tuple[int, int]] = []
    count = total = written = most = 0
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        tier = make(folder)

        def fill() -> None:
            nonlocal count, total, written
            while total < live_bytes:
                nbytes = chance.choice(sizes)
                tier.write(count, data[:nbytes])
                keys.append((count, nbytes))
                count, total, written = count + 1, total + nbytes, written + nbytes

        fill()
        written, began, before = 0, time.perf_counter(), time.process_time()
        for _ in range(ROUNDS):
            for _ in range(max(len(keys) // 10, 1)):
                key, nbytes = keys.pop(chance.randrange(len(keys)))
                tier.delete(key)
                total -= nbytes
            fill()
            tier.tidy()
            most = max(most, sum(p.stat().st_blocks * 512 for p in Path(folder).rglob("*") if p.is_file()))
        wall_s, cpu_s = time.perf_counter() - began, time.process_time() - before
        began = time.perf_counter()
        for key, _ in keys:
            tier.read(key)
        read_s = time.perf_counter() - began
        copied = tier.copied_bytes / written
        tier.close()
    return {
        "write_gb_per_s": written / 1e9 / wall_s,
        "cpu_s_per_gb": cpu_s / (written / 1e9),
        "read_gb_per_s": total / 1e9 / read_s,
        "disk_bytes_per_live_byte": most / live_bytes,
        "rewritten_bytes_per_byte": copied,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--folder", help="on the disk to measure; default: TMPDIR")
    given = parser.parse_args()
    rows: dict[tuple[str, str], list[dict[str, float]]] = {}
    for _ in range(given.runs):
        for case, (sizes, live_bytes) in CASES.items():
            for who, make in WHO.items():
                rows.setdefault((case, who), []).append(measure(make, sizes, live_bytes, given.folder))
    for (case, who), found in rows.items():
        for name in found[0]:
            value = round(statistics.median(row[name] for row in found), 3)
            print(json.dumps({"bench": "spike_disk_log", "case": case, "who": who, "measure": name, "value": value}))


if __name__ == "__main__":
    main()
