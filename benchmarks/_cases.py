"""What the main job is made of: each case computes on a cluster, and returns a few numbers that all must agree on.

Workers import this file, too. An array is of the host, of a simulated GPU or of a GPU: ``to`` says which.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import numpy as np
from _sizes import EXAMPLES, Size
from distributed import Client, Worker, wait

KNOWN = (100.0, 80.0, 60.0, 40.0, 20.0)
NOISE = 1e-6
Case = Callable[[Client, Size, str], list[float]]


def to_host(x: np.ndarray) -> np.ndarray:
    return x


def to_sim(x: np.ndarray) -> Any:
    from hpcgpu import sim

    return sim.asarray(x)


def to_gpu(x: np.ndarray) -> Any:
    import cupy

    return cupy.asarray(x)


TO = {"host": to_host, "sim": to_sim, "gpu": to_gpu}


def prepare(name: str, place: str) -> None:
    """Import what a case needs, so that no figure has it: the scheduler of LocalCluster has it from the client."""
    if name == "p2p shuffle":
        import dask.dataframe  # noqa: F401
        import distributed.shuffle  # noqa: F401

    if place == "sim":
        from hpcgpu.sim import register

        register()
    if place == "gpu":
        import cupy

        cupy.asarray(np.ones(1)).get()


def down(x: Any) -> np.ndarray:
    """Return an array of anywhere on the host."""
    return x.get() if hasattr(x, "get") else np.asarray(x)


def tall_svd(client: Client, size: Size, place: str) -> list[float]:
    """Singular values of a tall array, all factors kept: the demo's first."""
    rows, block = size.tall
    x = da.random.default_rng(1).random((rows, 100), chunks=(block, 100)).map_blocks(TO[place])
    kept = dask.persist(x, *da.linalg.svd(x))
    wait(kept)
    return [float(s) for s in down(kept[2].compute())]


def low_rank_svd(client: Client, size: Size, place: str) -> list[float]:
    """Five known singular values below noise: the demo's second."""
    n, block = size.low_rank
    rng = np.random.default_rng(7)
    left, right = (np.linalg.qr(rng.standard_normal((n, len(KNOWN))))[0] for _ in range(2))
    u = da.from_array(left * KNOWN, chunks=(block, -1)).map_blocks(TO[place])
    v = da.from_array(right.T, chunks=(-1, block)).map_blocks(TO[place])
    noise = da.random.default_rng(11).standard_normal((n, n), chunks=block).map_blocks(TO[place])
    a = (u @ v + NOISE * noise).persist()
    wait(a)
    _, s, _ = da.linalg.svd_compressed(a, k=len(KNOWN), n_power_iter=2, seed=_random_state(place))
    found = [float(s) for s in down(s.compute())]
    if not np.allclose(found, KNOWN, rtol=1e-3):
        raise RuntimeError(f"singular values are {found}, not {KNOWN}")
    return found


def _random_state(place: str) -> da.random.RandomState:
    if place == "sim":
        from hpcgpu.sim import RandomState
    elif place == "gpu":
        from cupy.random import RandomState
    else:
        RandomState = np.random.RandomState
    return da.random.RandomState(3, RandomState=RandomState)


def transpose_sum(client: Client, size: Size, place: str) -> list[float]:
    """``(x + x.T).sum()`` of an array that is kept: every block is needed beside one from elsewhere."""
    n, block = size.square
    x = da.random.default_rng(2).random((n, n), chunks=block).map_blocks(TO[place]).persist()
    wait(x)
    return [float(down((x + x.T).sum().compute()))]


def shuffle(client: Client, size: Size, place: str) -> list[float]:
    """Shuffle a frame by ``p2p``, and count the rows that lie where they belong; frames are the host's."""
    import dask.dataframe as dd

    rows, parts = size.frame
    frame = dd.from_map(make_part, range(parts), rows=rows // parts, meta=make_part(0, 1))
    out = frame.shuffle("key", npartitions=parts, shuffle_method="p2p").map_partitions(describe, meta=describe_meta())
    found = out.compute()
    total = found["rows"].sum()
    if total != rows // parts * parts or found["keys"].sum() != len(set(found["key"])):
        raise RuntimeError(f"{total} rows of {rows} are there, or a key is in two partitions")
    return [float(total), float(found["value"].sum())]


def make_part(i: int, rows: int) -> Any:
    import pandas as pd

    rng = np.random.default_rng(i)
    return pd.DataFrame({"key": rng.integers(0, 1000, rows), **{name: rng.random(rows) for name in "abcd"}})


def describe(part: Any) -> Any:
    """Return a row for each key of a partition."""
    counted = part.groupby("key")["a"].agg(["size", "sum"]).reset_index()
    counted.columns = ["key", "rows", "value"]
    return counted.assign(keys=1)


def describe_meta() -> Any:
    return describe(make_part(0, 1)).iloc[:0]


def hot_and_cold(client: Client, size: Size, place: str) -> list[float]:
    """Read some blocks at each step, and at each third step a quarter of many more, in turn."""
    hot = client.map(make_block, range(size.hot), nbytes=size.block_bytes, place=place, pure=False)
    cold = client.map(make_block, range(1000, 1000 + size.cold), nbytes=size.block_bytes, place=place, pure=False)
    wait([*hot, *cold])
    quarter, out = size.cold // 4, []
    for step in range(size.steps):
        read = [*hot]
        if step % 3 == 2:
            first = step // 3 * quarter % size.cold
            read += cold[first : first + quarter]
        out.append(sum(client.gather(client.map(read_block, read, step=step, pure=False))))
    return out


def make_block(i: int, nbytes: int, place: str) -> Any:
    return TO[place](np.random.default_rng(i).random(nbytes // 8))


def read_block(block: Any, step: int) -> float:
    return float(down((block * (step + 1)).sum()))


def small_tasks(client: Client, size: Size, place: str) -> list[float]:
    """Map a function that adds one."""
    return [float(sum(client.gather(client.map(add_one, range(size.tasks), pure=False))))]


def add_one(i: int) -> int:
    return i + 1


def example(name: str) -> Case:
    """Return what an example for other libraries computes, as a case with one number."""

    def case(client: Client, size: Size, place: str) -> list[float]:
        # pickled by value, as what a user's script defines
        path = Path(__file__).parents[1] / "examples" / "libraries" / f"{name}.py"
        compute = runpy.run_path(str(path), run_name="__main__ of a benchmark")["compute"]
        more = (Path(dask.config.get("temporary-directory"), "store.zarr"),) if name == "xarray_zarr" else ()
        found = compute(client, *more)
        numbers = list(found.values()) if type(found) is dict else found
        return [round(float(np.mean(np.asarray(numbers))), 3)]  # floats are added in any order

    return case


CASES: dict[str, Case] = {
    **{name: example(name) for name in EXAMPLES},
    "tall SVD": tall_svd,
    "low-rank SVD": low_rank_svd,
    "transpose-sum": transpose_sum,
    "p2p shuffle": shuffle,
    "hot and cold": hot_and_cold,
    "small tasks": small_tasks,
}


def keys(dask_worker: Worker) -> int:
    """Return how many keys a worker has."""
    return len(dask_worker.data)


def moved(dask_worker: Worker) -> dict[str, int]:
    """Return the bytes that a worker has moved: between its tiers by direction, and to peers that asked for keys."""
    store, out = dask_worker.data, {"to_peers": dask_worker.transfer_outgoing_bytes_total}
    if hasattr(store, "counters"):
        return out | {name: count.nbytes for name, count in store.counters.items()}
    if hasattr(store, "cumulative_metrics"):
        for ours, theirs in {"host_to_disk": "disk-write", "disk_to_host": "disk-read"}.items():
            out[ours] = int(store.cumulative_metrics.get((theirs, "bytes"), 0))
    return out
