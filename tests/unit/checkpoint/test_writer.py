"""The thread that writes a worker's chunks."""

import asyncio
import errno
import os
import pickle
import threading
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from hpcgpu.checkpoint.scheduler import FinishedChunks
from hpcgpu.checkpoint.segments import Chunk, Index, read
from hpcgpu.checkpoint.values import from_frames
from hpcgpu.checkpoint.writer import CheckpointPlugin, Writer, flush, outputs_of, part_of, sees

ONE, TWO = Chunk("run", (0, 1)), Chunk("run", (0, 2))


def values_in(folder: Path) -> dict[Chunk, Any]:
    index = Index(folder)
    index.refresh()
    return {chunk: from_frames(read(folder, chunk, place)) for chunk, place in index.chunks.items()}


def test_part_of_a_key_is_its_place_whatever_its_name() -> None:
    for name in ("a-1", "b-2"):
        outputs = outputs_of([(name, 0, 1), (name, 1, 0), "other"])
        parts = [part_of(key, outputs) for key in ((name, 1, 0), "other", ("stranger", 0))]
        assert parts == [(0, 1, 0), (1,), None]


def test_plugins_of_a_checkpoint_have_nothing_of_itertools() -> None:
    for plugin in (FinishedChunks(), CheckpointPlugin("/", "run", {})):
        assert b"itertools" not in pickle.dumps(plugin)  # Python 3.14 cannot pickle it


def test_writer_syncs_what_came_and_skips_released_keys(tmp_path: Path) -> None:
    writer = Writer({"a": [1, "x"]}, tmp_path, "w")
    for key, chunk in (("gone", TWO), ("a", ONE)):
        writer.put(key, chunk)
    assert (writer.flush(30).waiting, writer.status.trouble) == (0, "")
    assert values_in(tmp_path) == {ONE: [1, "x"]}
    writer.close()


def test_writer_writes_again_what_a_failed_sync_lost(tmp_path: Path) -> None:
    sync, failures = os.fsync, [OSError(errno.EIO, "I/O error")]

    def fails_once(file: int) -> None:
        if os.path.isfile(f"/proc/self/fd/{file}") and failures:  # noqa: PTH113 - not of the folder
            raise failures.pop()
        sync(file)

    with mock.patch("os.fsync", fails_once):
        writer = Writer({"a": 1, "b": 2}, tmp_path, "w")
        writer.put("a", ONE)
        while writer.flush(30).trouble or failures:
            assert "incomplete since 20" in (writer.status.trouble or "incomplete since 20")
        writer.put("b", TWO)
        assert writer.flush(30).waiting == 0
        writer.close()
    assert values_in(tmp_path) == {ONE: 1, TWO: 2}
    assert len(list(tmp_path.glob("*.segment"))) == 2


def test_writer_whose_segment_was_removed_begins_another(tmp_path: Path) -> None:
    writer = Writer({"a": 1, "b": 2}, tmp_path, "w")
    writer.put("a", ONE)
    writer.flush(30)
    for path in tmp_path.glob("*.segment"):
        path.unlink()
    writer.put("b", TWO)
    while writer.flush(30).waiting:
        continue
    writer.close()
    assert values_in(tmp_path) == {TWO: 2}


class Gate:
    """A value that is pickled when it may be."""

    def __init__(self) -> None:
        self.begun, self.opened = threading.Event(), threading.Event()

    def __reduce__(self) -> Any:
        self.begun.set()
        assert self.opened.wait(30)
        return Gate, ()


@pytest.fixture
def behind(tmp_path: Path) -> tuple[Writer, Gate]:
    """A writer that waits for its first chunk, while others come that took 0 to 4 s to compute."""
    gate = Gate()
    writer = Writer({"gate": gate, **{f"k{i}": i for i in range(5)}}, tmp_path, "w")
    writer.put("gate", ONE)
    assert gate.begun.wait(30)
    for i in range(5):
        writer.put(f"k{i}", Chunk("run", (1, i)), float(i))
    return writer, gate


def test_writer_that_is_behind_writes_the_dearest_first(tmp_path: Path, behind: tuple[Writer, Gate]) -> None:
    writer, gate = behind
    gate.opened.set()
    writer.close()  # writes all that came
    index = Index(tmp_path)
    index.refresh()
    assert [chunk.part for chunk in sorted(index.chunks, key=index.chunks.__getitem__)] == [
        (0, 1),
        *((1, i) for i in (4, 3, 2, 1, 0)),
    ]


async def test_writer_says_what_it_could_not_save(tmp_path: Path, behind: tuple[Writer, Gate]) -> None:
    writer, gate = behind
    assert await writer.save(0.1) == f"6 finished chunks not in {tmp_path}: the time, 0 s, was over"
    gate.opened.set()
    assert await writer.save(30.0) == ""
    writer.close()


@pytest.mark.parametrize(("token", "seen"), [("t1", True), ("t2", False)])
async def test_folder_is_seen_by_its_owners_record(tmp_path: Path, token: str, seen: bool) -> None:
    (tmp_path / "owner").write_text('{"token": "t1"}')
    assert await sees(str(tmp_path), token) is seen


def test_writer_of_large_arrays_takes_little_memory(tmp_path: Path) -> None:
    data = {str(i): np.full(48 << 20, i, np.uint8) for i in range(4)}
    tracemalloc.start()
    writer = Writer(data, tmp_path, "w")
    for i in range(4):
        writer.put(str(i), Chunk("run", (i,)))
    assert writer.flush(60).waiting == 0
    _, most_bytes = tracemalloc.get_traced_memory()  # NumPy's arrays included
    tracemalloc.stop()
    writer.close()
    assert most_bytes < 8 << 20
    assert [values_in(tmp_path)[Chunk("run", (i,))][0] for i in range(4)] == [0, 1, 2, 3]


class Outputs(dict[Any, int]):
    """Notes the threads that look names up."""

    def __init__(self, *names: Any) -> None:
        super().__init__({name: i for i, name in enumerate(names)})
        self.threads: set[int] = set()

    def get(self, name: Any, default: Any = None) -> Any:
        self.threads.add(threading.get_ident())
        return super().get(name, default)


def test_plugin_takes_chunks_that_exist_off_the_event_loop(tmp_path: Path) -> None:
    outputs = Outputs("x")
    loop = SimpleNamespace(add_callback=lambda *_: None)
    worker: Any = SimpleNamespace(
        data={("x", i): i for i in range(100)}, name="w", loop=loop, handlers={}, state=SimpleNamespace(tasks={})
    )

    async def come_and_go() -> None:
        plugin = CheckpointPlugin(str(tmp_path), "run", outputs)
        await plugin.setup(worker)
        status = await flush(str(tmp_path), 30, worker)
        assert (status.waiting, status.trouble) == (0, "")
        await plugin.teardown(worker)

    asyncio.run(come_and_go())
    assert values_in(tmp_path) == {Chunk("run", (0, i)): i for i in range(100)}
    assert outputs.threads
    assert threading.get_ident() not in outputs.threads
