"""The identity of a computation: the same in each start of a script, and another one for other values."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import dask.bag as db
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from programs import python
from waiting import LIMIT_S

from hpcgpu.checkpoint.computation import Computation
from hpcgpu.errors import ConfigError

# Each makes a collection of a number; another number is another computation of the same form.
KINDS: dict[str, Callable[[int], Any]] = {
    "array": lambda n: da.ones((8, 8), chunks=4) * n,
    "random": lambda n: da.random.default_rng(n).random((8, 8), chunks=4),
    "bag": lambda n: db.from_sequence([n, 1, 2], npartitions=3).map(abs),
    "frame": lambda n: dd.from_pandas(pd.DataFrame({"a": range(8)}), npartitions=2) + n,
    "delayed": lambda n: dask.delayed(abs)(dask.delayed(max)(n, dask.delayed(min)(n, 1))),
}
IN_ANOTHER_PROCESS = """
from test_computation import KINDS
from hpcgpu.checkpoint.computation import Computation
for make in KINDS.values():
    print(Computation.of(make(3), {}).digests[""])
"""


def differences(before: Any, now: Any, *, alike: bool = False) -> list[str]:
    return Computation.of(before, {}).differences(Computation.of(now, {}), alike=alike)


@pytest.mark.parametrize("kind", KINDS)
def test_computation_made_twice_is_the_same(kind: str) -> None:
    assert differences(KINDS[kind](3), KINDS[kind](3)) == []


def test_computation_in_another_process_is_the_same() -> None:
    path = ":".join([str(Path(__file__).parent), *sys.path])
    done = python(IN_ANOTHER_PROCESS, env={**os.environ, "PYTHONPATH": path})
    assert done.stdout.split() == [Computation.of(make(3), {}).digests[""] for make in KINDS.values()]


# argv: a line that changes, and the folder of a module of the user's
SCRIPT = """
import dataclasses, functools, sys
sys.path.insert(0, sys.argv[2])
import dask, dask.array as da, dask.dataframe as dd, numpy as np, pandas as pd
from hpcgpu.checkpoint.computation import Computation
from steps import step

UNUSED, FACTOR = {changed}

@dataclasses.dataclass
class Options:
    factor: int
    def scaled(self, x):
        return times(x) * self.factor

def times(x):
    return x * FACTOR if FACTOR else times(x - 1)

x = da.ones((4, 4), chunks=2)
kinds = [
    x.map_blocks(times, dtype=float), x.map_blocks(Options(2).scaled, dtype=float),
    x.map_blocks(functools.partial(lambda x, kind: kind(x).scaled(1), kind=Options), dtype=float),
    x.map_blocks(step(3), dtype=float), dask.optimize(x + x.T * 2)[0],
    dask.delayed(times)([dask.delayed(times)(1), dask.delayed(abs)(2)]),
    dd.from_pandas(pd.DataFrame({{"a": list("abcd")}}), npartitions=2)\
        .map_partitions(times, meta={{"a": str}}).optimize(),
]
for each in kinds:
    print(Computation.of(each, {{}}).digests[""])
"""


def digests_of(tmp_path: Path, name: str, changed: str, seed: str) -> list[str]:
    path, steps = tmp_path / name, tmp_path / "steps"
    steps.mkdir(exist_ok=True)
    (steps / "steps.py").write_text("def step(n):\n    return lambda x: (x, 'a step', n, 'a' 'step')\n")
    path.write_text(SCRIPT.format(changed=changed))
    env = {**os.environ, "PYTHONHASHSEED": seed}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run([sys.executable, path, name, steps], capture_output=True, text=True, timeout=LIMIT_S, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_computation_of_an_edited_script_is_the_same(tmp_path: Path) -> None:
    first = digests_of(tmp_path, "one.py", "1, 2", "1")  # compiles the module; the next one finds its .pyc file
    assert len(set(first)) == 7
    assert digests_of(tmp_path, "another.py", "(\n    3\n), 2", "2") == first
    other = digests_of(tmp_path, "one.py", "1, 3", "1")
    assert [now == before for now, before in zip(other, first, strict=True)] == [0, 0, 0, 1, 1, 0, 0]


def test_computation_with_a_list_in_another_order_differs() -> None:
    one, two = dask.delayed(abs)(1), dask.delayed(abs)(2)
    assert differences(dask.delayed(max)([one, two]), dask.delayed(max)([two, one])) != []


def test_computation_of_a_name_with_other_content_differs() -> None:
    x = da.ones(4, chunks=2)
    assert differences(x.map_blocks(np.sin, name="y"), x.map_blocks(np.cos, name="y")) != []


@pytest.mark.parametrize("kind", KINDS)
def test_computation_of_another_number_differs_in_its_graph(kind: str) -> None:
    (text,) = differences(KINDS[kind](3), KINDS[kind](4))
    assert text.startswith("the graph: tasks ")
    assert text.endswith("have other arguments, functions or numbers")
    assert differences(KINDS[kind](3), KINDS[kind](4), alike=True) == []


def test_computation_with_arguments_changed_over_differs() -> None:
    one, two = dask.delayed(abs)(1), dask.delayed(abs)(2)
    assert differences(dask.delayed(divmod)(one, two), dask.delayed(divmod)(two, one)) != []


def test_computation_with_other_tasks_names_them() -> None:
    [text] = differences(da.ones(8, chunks=4) + 1, da.ones(8, chunks=4) * 2, alike=True)
    assert text == "the graph: only one of them has tasks 'add', 'mul'"


@pytest.mark.parametrize(
    ("now", "texts"),
    [
        (
            da.ones((8, 4), chunks=4),
            ["shape (8, 8) there, (8, 4) now", "chunks ((4, 4), (4, 4)) there, ((4, 4), (4,)) now"],
        ),
        (da.ones((8, 8), chunks=8), ["chunks ((4, 4), (4, 4)) there, ((8,), (8,)) now"]),
        (da.ones((8, 8), chunks=4, dtype="f4"), ["dtype float64 there, float32 now"]),
    ],
    ids=["shape", "chunks", "dtype"],
)
def test_computation_of_another_form_says_what_differs(now: Any, texts: list[str]) -> None:
    found = differences(da.ones((8, 8), chunks=4), now)
    assert [text for text in found if not text.startswith("the graph")] == texts


def test_computation_with_other_columns_says_what_differs() -> None:
    frames = [dd.from_pandas(pd.DataFrame({name: range(8)}), npartitions=2) for name in "ab"]
    assert differences(*frames)[0] == "columns a int64 there, b int64 now"


def test_computation_of_no_collection_is_refused() -> None:
    with pytest.raises(ConfigError, match="the collection is of type ndarray: a checkpoint takes a Dask array"):
        Computation.of(np.ones(3), {})
