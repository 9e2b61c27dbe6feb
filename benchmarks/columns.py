"""One column of a data frame that is on disk, beside all of it: with jit_unspill, and in distributed's SpillBuffer.

One JSON line per figure; ``runs`` says of how many runs it is the median. The frame has 20 columns of a million random
numbers (160 MB) in one block, as ``read_parquet`` makes it.

``read_ms``, ``read_bytes``
    Until the sum of the column is there, and what was read for it, from the page cache.
``host_bytes``
    What the store has in host memory afterwards.
``ms``
    What columns would cost that are units of their own, each an array: making them from the block, and rows of the
    frame of 20 blocks that comes back (the sums of its rows, as NumPy's array), beside the frame of one block.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
from distributed.spill import SpillBuffer

from hpcgpu import unproxy
from hpcgpu.spill import GpuSpillBuffer

ROWS, COLUMNS = 1_000_000, 20
ONE = f"the sum of one of {COLUMNS} columns"
APART, TOGETHER = f"{COLUMNS} blocks", "one block"
Figure = tuple[str, str, str, float, str]


def make_frame() -> pd.DataFrame:
    return pd.DataFrame(np.random.default_rng(0).random((COLUMNS, ROWS)).T, columns=[f"c{i}" for i in range(COLUMNS)])


def milliseconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def ours() -> Iterator[Figure]:
    asks: dict[str, Callable[[Any], Any]] = {
        "hpcgpu, the column": lambda proxy: proxy["c7"].sum(),
        "hpcgpu, the whole frame": lambda proxy: unproxy(proxy)["c7"].sum(),
    }
    for who, ask in asks.items():
        store = GpuSpillBuffer(0, None, jit_unspill=True)
        store["list"] = [make_frame()]
        while store.tiers["host"] > ROWS:
            store.evict()
            if not store.settle():
                raise RuntimeError("the frame does not go to disk")
        proxy = store["list"][0]
        yield ONE, who, "read_ms", milliseconds(lambda: ask(proxy)), "ms"  # noqa: B023 - called at once
        yield ONE, who, "read_bytes", store.counters["disk_to_host"].nbytes, "bytes"
        yield ONE, who, "host_bytes", store.tiers["host"], "bytes"
        store.close()


def peer() -> Iterator[Figure]:
    with TemporaryDirectory() as folder:
        store = SpillBuffer(folder, target=1 << 40)
        store["list"] = [make_frame()]
        store.evict()
        yield ONE, "SpillBuffer", "read_ms", milliseconds(lambda: store["list"][0]["c7"].sum()), "ms"


def apart() -> Iterator[Figure]:
    frame = make_frame()
    columns = {name: frame[name].to_numpy().copy() for name in frame}
    yield "columns made from the block", APART, "ms", milliseconds(lambda: [frame[n].copy() for n in frame]), "ms"
    for who, x in ((TOGETHER, frame), (APART, pd.DataFrame(columns, copy=False))):
        yield "sums of rows", who, "ms", milliseconds(lambda: x.sum(axis=1)), "ms"  # noqa: B023 - called at once
        yield "as an array", who, "ms", milliseconds(x.to_numpy), "ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    found: dict[tuple[str, str, str, str], list[float]] = defaultdict(list)
    runs = parser.parse_args().runs
    for _ in range(runs):
        for figures in (ours, peer, apart):
            for case, who, measure, value, unit in figures():
                found[case, who, measure, unit].append(value)
    for (case, who, measure, unit), values in found.items():
        figure = {"bench": "columns", "case": case, "who": who, "measure": measure}
        print(json.dumps({**figure, "value": round(median(values), 2), "unit": unit, "runs": runs}))


if __name__ == "__main__":
    main()
