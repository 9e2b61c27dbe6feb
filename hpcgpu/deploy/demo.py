"""The script of ``hpcgpu demo``: two singular value decompositions that do not fit on the GPUs."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import dask
import dask.array as da
import numpy as np
from distributed import Client, futures_of, wait

import hpcgpu
from hpcgpu import sim
from hpcgpu.sim import register
from hpcgpu.units import format_bytes

_KNOWN = (100.0, 80.0, 60.0, 40.0, 20.0)
_NOISE = 1e-6
_TIERS = ("device_to_host", "host_to_disk")


def main() -> int:
    """Run and check both; return 0 only if they agree and each tier was used."""
    register()
    with Client() as client:
        print(hpcgpu.bindings(client))
        limit = hpcgpu.memory(client).workers[0].host_limit_bytes
        print(f"memory_limit of each worker: {format_bytes(limit) if limit else 'none'}\n", flush=True)
        agree = [_tall_and_skinny(client)]
        gc.collect()  # Dask's collections hold cycles: without this the workers would keep 3.2 GB
        agree.append(_low_rank(client))
        memory = hpcgpu.memory(client)
        print(f"spilled: {memory.moved}")
        unused = [name for name in _TIERS if not memory.total.moved[name].number]
        for name in unused:
            print(f"no bytes went {name.replace('_', ' ')}: the demo was to use every tier")
        good = all(agree) and not unused
        print("the demo is right" if good else "the demo FAILED", flush=True)
        return 0 if good else 1


def _tall_and_skinny(client: Client) -> bool:
    """Decompose 1.6 GB, all of it kept, and compare with the eigenvalues of the Gram matrix summed on the host."""
    with _step("SVD of 2,000,000 x 100"):
        x = da.random.random((2_000_000, 100), chunks=(10_000, 100)).map_blocks(sim.asarray)
        u, s, v = da.linalg.svd(x)
        x, u, s, v = dask.persist(x, u, s, v)
        _follow(client, [x, u, s, v])
        values = s.compute().get()
    with _step("its check on the host"):
        parts = [_gram(block) for block in x.to_delayed().ravel()]
        gram = dask.delayed(sum)(parts).compute()
        expected = np.sqrt(np.linalg.eigvalsh(gram)[::-1])
    return _agrees("singular values against the Gram matrix", values, expected, 1e-8)


@dask.delayed
def _gram(block: Any) -> np.ndarray:  # an array of the device
    host = block.get()
    return host.T @ host


def _low_rank(client: Client) -> bool:
    """Compute five singular values, known and below noise."""
    n, chunk = 10_000, 2_000
    rng = np.random.default_rng(7)
    left, right = (np.linalg.qr(rng.standard_normal((n, len(_KNOWN))))[0] for _ in range(2))
    with _step("SVD (compressed) of 10,000 x 10,000"):
        u = da.from_array(left * _KNOWN, chunks=(chunk, -1)).map_blocks(sim.asarray)
        v = da.from_array(right.T, chunks=(-1, chunk)).map_blocks(sim.asarray)
        noise = da.random.default_rng(11).standard_normal((n, n), chunks=chunk).map_blocks(sim.asarray)
        a = (u @ v + _NOISE * noise).persist()
        _follow(client, [a])
        seed = da.random.RandomState(3, RandomState=sim.RandomState)
        _, s, _ = da.linalg.svd_compressed(a, k=len(_KNOWN), n_power_iter=2, seed=seed)
        values = s.compute().get()
    return _agrees("singular values against the known ones", values, np.asarray(_KNOWN), 1e-4)


def _follow(client: Client, collections: list[Any], every_s: float = 3.0) -> None:
    """Print the progress every few seconds until all blocks are there."""
    futures = list({f.key: f for f in futures_of(collections)}.values())
    waiting = futures
    while waiting:
        with suppress(TimeoutError):
            wait(waiting, timeout=every_s)
        waiting = [f for f in futures if f.status == "pending"]
        tiers = hpcgpu.memory(client).total.tiers
        held = ", ".join(f"{format_bytes(size)} on {name}" for name, size in tiers.items())
        print(f"  {len(futures) - len(waiting)} of {len(futures)} blocks; {held}", flush=True)


def _agrees(what: str, values: np.ndarray, expected: np.ndarray, rtol: float) -> bool:
    worst = float(np.max(np.abs(values - expected) / expected))
    good = worst <= rtol
    print(f"  {what}: largest relative difference {worst:.1e}, allowed {rtol:.0e}: {'agree' if good else 'DIFFER'}")
    return good


@contextmanager
def _step(name: str) -> Iterator[None]:
    print(f"{name} …", flush=True)
    start = time.monotonic()
    yield
    print(f"{name}: {time.monotonic() - start:.1f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
