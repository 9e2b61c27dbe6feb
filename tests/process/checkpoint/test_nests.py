"""What a checkpoint takes under one name: futures, several collections; and collections that are persisted already."""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import dask.bag as db
import dask.dataframe as dd
import distributed
import numpy as np
import pandas as pd
import pytest
from distributed import Client, Future, LocalCluster, wait
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from waiting import until

from hpcgpu import Checkpoint
from hpcgpu.checkpoint.writer import Writer
from hpcgpu.errors import ConfigError

RAN: list[Any] = []


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    cluster = LocalCluster(n_workers=2, threads_per_worker=1, processes=False, dashboard_address=None)
    with cluster, Client(cluster) as client:
        yield client


def counted(x: Any, *_: Any) -> Any:
    RAN.append(x)
    return x


def ran_in(call: Callable[[], Any]) -> int:
    before = len(RAN)
    call()
    return len(RAN) - before


def array(n: int = 1) -> Any:
    x = da.arange(8 * 100, chunks=100) * n
    return x.map_blocks(counted, dtype=x.dtype, meta=np.empty(0, x.dtype))


def state(client: Client) -> dict[str, Any]:
    frame = dd.from_pandas(pd.DataFrame({"a": range(9)}), npartitions=3)
    x = array()
    return {
        "arrays": [x, x[:400] + 1, x],
        "frame": frame.map_partitions(counted, meta={"a": "i8"}).assign(b=1),
        "others": (db.from_sequence(range(4), npartitions=2).map(counted), dask.delayed(counted)("text")),
        "future": client.submit(np.add, 1, 2),
    }


def of_state(nest: dict[str, Any]) -> list[Any]:
    """Return the values in a state."""
    x, y, again, frame, bag, text = dask.compute(*nest["arrays"], nest["frame"], *nest["others"])
    future = nest["future"]
    number = future.result() if isinstance(future, Future) else future.compute()
    return [x.tolist(), y.tolist(), again.tolist(), frame.to_dict("list"), bag, text, number]


def test_nest_of_collections_is_kept_under_one_name(client: Client, tmp_path: Path) -> None:
    values = []

    def start() -> None:
        with Checkpoint(tmp_path / "run", client) as checkpoint:
            nest = checkpoint.persist(state(client), name="state")
            assert {key: type(each) for key, each in nest.items()} == {
                "arrays": list,
                "frame": dd.DataFrame,
                "others": tuple,
                "future": Future,
            }
            values.append(of_state(nest))
            assert checkpoint.flush()

    assert ran_in(start) == 8 + 3 + 4 + 1
    assert ran_in(start) == 0
    values.append(of_state(Checkpoint(tmp_path / "run").load("state")))
    (row,) = Checkpoint(tmp_path / "run").progress().rows
    assert (row.done, row.count, row.kind) == (8 + 4 + 3 + 2 + 1 + 1, 19, "dict")
    assert values[0] == values[1] == values[2]


def tasks_of(dask_scheduler: Any) -> list[Any]:
    return list(dask_scheduler.tasks)


def test_future_is_read_while_it_could_be_computed(client: Client, tmp_path: Path) -> None:
    def start(*, waits: bool) -> None:
        with Checkpoint(tmp_path / "run", client) as checkpoint:
            inputs = [client.submit(counted, 1, resources={"of no worker": 1})] if waits else []
            future = checkpoint.persist(client.submit(counted, 3, *inputs, key="three"), name="f")
            assert future.result() == 3
            assert client.submit(counted, future, pure=False).result() == 3
            assert checkpoint.flush()

    assert ran_in(lambda: start(waits=False)) == 2
    gc.collect()
    until(lambda: not client.run_on_scheduler(tasks_of), "the scheduler has forgotten the first one", limit_s=60)
    assert ran_in(lambda: start(waits=True)) == 1
    assert Checkpoint(tmp_path / "run").load("f").compute() == 3


def test_future_of_a_future_is_alike_in_each_start(client: Client, tmp_path: Path) -> None:
    def start(**options: Any) -> Any:  # the token of a future is new each time (distributed 2026.8.0)
        with Checkpoint(tmp_path / "run", client) as checkpoint:
            future = client.submit(counted, 3, client.submit(counted, 2))
            return checkpoint.persist(future, name="f", **options).result()

    assert start() == 3
    with pytest.raises(ConfigError, match=r"have other arguments, .*, or alike=True, if its arguments are new"):
        start()
    assert start(alike=True) == 3


def test_nest_with_another_collection_says_where(client: Client, tmp_path: Path) -> None:
    with Checkpoint(tmp_path / "run", client) as checkpoint:
        checkpoint.persist({"a": [array()], "b": array()}, name="x")
        with pytest.raises(ConfigError, match=r"\(\['a'\]\[0\] shape \(800,\) there, \(400,\) now; .*overwrite=True"):
            checkpoint.persist({"a": [array()[:400]], "b": array()}, name="x")
        with pytest.raises(ConfigError, match=r"\(type dict there, list now; .*; 10 more\)\. Give another name"):
            checkpoint.persist([array()], name="x")
        with pytest.raises(ConfigError, match=r"\['step'\] is of type int: a checkpoint takes a Dask array"):
            checkpoint.persist({"a": array(), "step": 3}, name="y")
        with pytest.raises(ConfigError, match="persist has no option overwrit; it has overwrite, alike, workers"):
            checkpoint.persist(array(), name="x", overwrit=True)
        assert checkpoint.names == ("x",)


def test_persisted_collection_is_kept_too(client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Writer, "put", lambda w, *of, put=Writer.put: (put(w, *of), w.flush(5.0)))  # on disk at once

    def start() -> None:
        with Checkpoint(tmp_path / "run", client) as checkpoint:
            x = client.persist(array())
            checkpoint.persist(x, name="x")
            wait(x)
            y = checkpoint.persist(x, name="y")
            z = checkpoint.persist(y, name="z")
            assert int((y + z).sum().compute()) == 2 * 319600
            assert checkpoint.flush()

    for _ in range(2):
        start()
        assert [(row.name, row.done) for row in Checkpoint(tmp_path / "run").progress().rows] == [(n, 8) for n in "xyz"]
    assert int(Checkpoint(tmp_path / "run").load("z").sum().compute()) == 319600


@settings(max_examples=8, deadline=None)
@given(
    arrays.arrays(
        # of this machine's order of bytes: np.concatenate makes chunks of the other one so, and Dask joins them by it
        arrays.integer_dtypes(endianness="=")
        | arrays.floating_dtypes(endianness="=")
        | arrays.unicode_string_dtypes(endianness="=", max_len=3),
        arrays.array_shapes(min_side=0, max_dims=2, max_side=4),
    ),
    st.integers(1, 4),
)
def test_array_is_loaded_bit_for_bit(client: Client, tmp_path_factory: Any, values: Any, chunk: int) -> None:
    folder = tmp_path_factory.mktemp("law") / "run"
    x = da.from_array(values, chunks=chunk).map_blocks(counted, dtype=values.dtype)
    expected = x.compute(scheduler="synchronous")
    for _ in range(2):
        with Checkpoint(folder, client) as checkpoint:
            assert checkpoint.persist(x, name="x").compute().tobytes() == expected.tobytes()
            assert checkpoint.flush()
    loaded = Checkpoint(folder).load("x").compute(scheduler="synchronous")
    assert (loaded.dtype, loaded.shape, loaded.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())


def test_checkpoint_of_eight_workers_is_restored_on_fewer(tmp_path: Path) -> None:
    def start(workers: int) -> None:
        options = {"threads_per_worker": 1, "processes": False, "dashboard_address": None}
        cluster = LocalCluster(n_workers=workers, **options)
        with cluster, Client(cluster), Checkpoint(tmp_path / "run") as checkpoint:
            x = checkpoint.persist(array().rechunk(50), name="x")
            y = checkpoint.persist(array().rechunk(200), name="other-chunks")
            assert np.array_equal(x.compute(), np.arange(800))
            assert np.array_equal(y.compute(), np.arange(800))
            assert checkpoint.flush()

    assert ran_in(lambda: start(8)) >= 8  # what both names need is kept only if they are computed at the same time
    assert ran_in(lambda: start(4)) == 0
    assert ran_in(lambda: start(3)) == 0


def test_annotations_are_kept(client: Client, tmp_path: Path) -> None:
    one = min(client.nthreads())

    def where(x: Any) -> Any:
        return np.full_like(x, distributed.get_worker().address == one)

    with dask.annotate(workers=[one]):
        x = da.zeros(8, chunks=1).map_blocks(where, dtype=float)
    with Checkpoint(tmp_path / "run", client) as checkpoint, dask.config.set({"optimization.fuse.active": False}):
        assert checkpoint.persist(x + 0, name="x").sum().compute() == 8


def test_load_from_no_folder_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("none", "file"):
        with pytest.raises(ConfigError, match=f"there is no folder {tmp_path}/{name}"):
            Checkpoint(tmp_path / name).load("x")
