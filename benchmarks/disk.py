"""How fast values go to disk and come back: the disk tier, beside zict.File as distributed's SpillBuffer and dd.

One JSON line per figure; medians of ``--runs`` runs, in which all take turns. The values are arrays of random bytes,
which nothing compresses, of 8 MiB, 256 KiB and 16 KiB.

``write``, ``write+sync``
    GB/s until everything is written, and until it is on the disk (``sync(2)`` after the last one, for all alike).
``read``
    GB/s back into memory, from the page cache: what the store adds to the disk's own time.
``write_cpu``, ``read_cpu``
    CPU seconds of the process, per GB; the kernel's writing back is not in it.

``hpcgpu, again`` writes to room that was freed before, and reads into memory of
:class:`hpcgpu.spill.storage.disk.Slabs` that was used before. dd writes and reads one file in blocks of the same
size.
"""
# ruff: noqa: D102

from __future__ import annotations

import argparse
import os
import random
import resource
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from functools import partial
from pathlib import Path

import _figures
import numpy as np
import zict
from distributed.protocol import deserialize_bytes, serialize_bytelist

from hpcgpu.spill.state.instructions import DISK, HOST
from hpcgpu.spill.storage.disk import Disk, Slabs
from hpcgpu.spill.store import register
from hpcgpu.spill.values.unit import SkeletonUnit

MIB = 2**20
SIZES = {"8 MiB": 8 * MIB, "256 KiB": MIB // 4, "16 KiB": MIB // 64}


class Tier(ABC):
    """Something that stores values."""

    def __init__(self, folder: str, values: list[np.ndarray]) -> None:
        self.folder, self.values = folder, values

    @abstractmethod
    def write(self) -> None:
        """Write all values."""

    @abstractmethod
    def read(self) -> None:
        """Read them back, each into memory of its own; it is given up at once."""

    def close(self) -> None:  # noqa: B027
        """Remove what was written."""


class Ours(Tier):
    """The disk tier; the unit of the store that pickles, as the store does."""

    slabs: Slabs | None = None

    def __init__(self, folder: str, values: list[np.ndarray]) -> None:
        super().__init__(folder, values)
        self.disk = Disk(folder, self.slabs)
        self.units = [SkeletonUnit(value, value.nbytes) for value in values]

    def write(self) -> None:
        for unit in self.units:
            unit.put(DISK, unit.copied(HOST, DISK, self.disk))

    def read(self) -> None:
        for unit in self.units:
            unit.copied(DISK, HOST, self.disk)

    def close(self) -> None:
        self.disk.close()


class OursAgain(Ours):
    """The same, a while after the start: there is room on disk, and memory, that was used before."""

    def __init__(self, folder: str, values: list[np.ndarray]) -> None:
        self.slabs = Slabs(64 * MIB)
        super().__init__(folder, values)
        one_more = SkeletonUnit(values[0], values[0].nbytes)  # so that the files are not removed
        one_more.put(DISK, one_more.copied(HOST, DISK, self.disk))
        self.kept = one_more
        self.write()
        self.read()
        self.units = [SkeletonUnit(value, value.nbytes) for value in values]
        self.disk.empty_bin()


class ZictFile(Tier):
    """What distributed's SpillBuffer does (spill.py, 2026.8.0)."""

    def __init__(self, folder: str, values: list[np.ndarray]) -> None:
        super().__init__(folder, values)
        self.store = zict.Func(partial(serialize_bytelist, on_error="raise"), deserialize_bytes, zict.File(folder))

    def write(self) -> None:
        for i, value in enumerate(self.values):
            self.store[str(i)] = value

    def read(self) -> None:
        for i in range(len(self.values)):
            self.store[str(i)]


class Dd(Tier):
    """One file, in blocks."""

    def write(self) -> None:
        self.run("if=/dev/zero", f"of={self.folder}/file")

    def read(self) -> None:
        self.run(f"if={self.folder}/file", "of=/dev/null")

    def run(self, *operands: str) -> None:
        argv = ["dd", "status=none", f"bs={self.values[0].nbytes}", f"count={len(self.values)}", *operands]
        subprocess.run(argv, check=True)


WHO: dict[str, type[Tier]] = {"hpcgpu": Ours, "hpcgpu, again": OursAgain, "zict.File": ZictFile, "dd": Dd}


def cpu_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def one_run(kind: type[Tier], folder: Path, values: list[np.ndarray]) -> dict[str, float]:
    gigabytes = sum(v.nbytes for v in values) / 1e9
    with tempfile.TemporaryDirectory(dir=folder) as home:
        tier = kind(home, values)
        os.sync()
        cpu, start = cpu_s(), time.perf_counter()
        tier.write()
        written, write_cpu = time.perf_counter(), cpu_s() - cpu
        os.sync()
        synced, cpu = time.perf_counter(), cpu_s()
        tier.read()
        read, read_cpu = time.perf_counter(), cpu_s() - cpu
        tier.close()
    return {
        "write": gigabytes / (written - start),
        "write+sync": gigabytes / (synced - start),
        "read": gigabytes / (read - synced),
        "write_cpu": write_cpu / gigabytes,
        "read_cpu": read_cpu / gigabytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where to write")
    parser.add_argument("--mib", type=int, default=512, help="how much to write; a quarter of it at 16 KiB")
    args = parser.parse_args()
    register()
    rng = np.random.default_rng(0)
    for case, size in SIZES.items():
        total = args.mib * MIB // (4 if size < MIB // 16 else 1)
        values = [np.frombuffer(rng.bytes(size), np.uint8) for _ in range(total // size)]
        found: dict[tuple[str, str], list[float]] = defaultdict(list)
        for _ in range(args.runs):
            for who, kind in random.sample(list(WHO.items()), len(WHO)):
                for measure, value in one_run(kind, args.folder, values).items():
                    found[who, measure].append(value)
        for (who, measure), got in sorted(found.items()):
            unit = "s/GB" if measure.endswith("cpu") else "GB/s"
            _figures.report("disk", case, who, measure, got, unit)


if __name__ == "__main__":
    main()
