"""cudf-polars' DaskEngine leaves workers bound as they are: its own binding code, on GPUs that a fake NVML shows.

``cudf_polars/engine/hardware_binding.py`` is the installed one. Replayed are rapidsmpf's ``bind``, by the rule of
cpp/src/rrun/rrun.cpp (resolve_gpu_id, apply_bindings) at 02ca47a7, and the calls of DaskEngine, by
cudf_polars/engine/dask.py at 6a22d1d2f90 of cudf.
"""

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest
import ranks
from fake_nvml import FakeGpu, FakeNvml, compiled
from paths import ROOT, TOPOLOGIES

GPUS = [FakeGpu(pci, f"GPU-{i}", size_mib=1024) for i, pci in enumerate(("0000:06:00.0", "0000:16:00.0"))]
# GPU 0 is beside the first core that the test may use, GPU 1 beside the others.
RRUN = """
import os

def bind(gpu_id=None, cpu=True, memory=True, network=False):
    if gpu_id is None:
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0]
        try:
            gpu_id = int(first)
        except ValueError:
            raise RuntimeError(f"CUDA_VISIBLE_DEVICES first entry ('{first}') is not a valid GPU ID") from None
    cores = sorted(map(int, os.environ["TEST_CORES"].split(",")))
    os.sched_setaffinity(0, cores[:1] if gpu_id == 0 else cores[1:])
"""
ENGINE = """
import threading
from cudf_polars.engine.hardware_binding import bind_to_gpu

def _setup_worker(*, hardware_binding, dask_worker=None):
    bind_to_gpu(hardware_binding)
    dask_worker.setup_thread = threading.get_ident()

def _evaluate(*, dask_worker=None):
    import asyncio
    try:
        asyncio.get_running_loop()
        return "on the event loop"
    except RuntimeError:
        return "in its thread" if threading.get_ident() == dask_worker.setup_thread else "in another thread"
"""
SCRIPT = """
    import functools, hpcgpu, json
    from cudf_polars.engine import dask as engine
    from cudf_polars.engine.hardware_binding import HardwareBindingPolicy
    with Client() as client:
        mask = lambda: sorted(os.sched_getaffinity(0))
        before, masks = hpcgpu.bindings(client), client.run(mask)
        try:
            client.run(functools.partial(engine._setup_worker, hardware_binding=HardwareBindingPolicy()))
        except Exception as e:
            print(json.dumps({"error": str(e)}))
            sys.exit()
        after = hpcgpu.bindings(client)
        print(json.dumps({
            "before": before.differences, "after": after.differences,
            "same": masks == client.run(mask),
            "cores": len({w.spec.binding.cpuset for w in after.workers}),
            "devices": sorted(client.run(lambda: os.environ["CUDA_VISIBLE_DEVICES"]).values()),
            "evaluated": sorted(client.run(engine._evaluate).values()),
        }))
"""
# As engine/dask.py of 26.10.2 counts its ranks and starts them.
RANKS = """
    import functools, json, pathlib
    from cudf_polars.engine import dask as engine
    from cudf_polars.engine.hardware_binding import HardwareBindingPolicy
    exec(pathlib.Path(sys.argv[1]).read_text())
    with Client() as every:
        client = GpuWorkers(every)
        nranks = len(client.scheduler_info(n_workers=-1)["workers"])
        started = client.run(functools.partial(engine._setup_worker, hardware_binding=HardwareBindingPolicy()))
        print(json.dumps([len(every.nthreads()), nranks, len(started)]))
"""


@pytest.fixture(scope="module")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> FakeNvml:
    return compiled(tmp_path_factory.mktemp("nvml"))


def run(folder: Path, nvml: FakeNvml, cores: str, *options: str, script: str = SCRIPT, words: tuple = ()) -> Any:
    """Run the engine's calls in a cluster; the packages beside the real module are stubs."""
    real = Path(importlib.util.find_spec("cudf_polars").submodule_search_locations[0], "engine", "hardware_binding.py")
    stubs = {
        "cudf_polars/__init__.py": "",
        "cudf_polars/engine/__init__.py": "",
        "cudf_polars/engine/hardware_binding.py": real.read_text(),
        "cudf_polars/engine/dask.py": ENGINE,
        "rapidsmpf/__init__.py": "",
        "rapidsmpf/bootstrap.py": "is_running_with_rrun = lambda: False",
        "rapidsmpf/rrun/__init__.py": "",
        "rapidsmpf/rrun/rrun.py": RRUN,
    }
    for name, text in stubs.items():
        path = folder / "site" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    more = {"HWLOC_XMLFILE": str(TOPOLOGIES / "turin-4gpu-nvml.xml"), "PYTHONPATH": str(folder / "site")}
    env = {**nvml.environment(GPUS), **more, "TEST_CORES": cores}
    done = ranks.run(ranks.script(folder, script), *words, options=options, env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_engine_leaves_workers_as_they_are_bound(tmp_path: Path, nvml: FakeNvml) -> None:
    cores = ",".join(map(str, os.sched_getaffinity(0)))
    if "," not in cores:
        pytest.skip("needs two cores")
    shown = run(tmp_path, nvml, cores)
    assert shown["devices"] == ["GPU-0,GPU-1", "GPU-1,GPU-0"]  # UUIDs, which rapidsmpf does not read
    assert (shown["before"], shown["after"], shown["same"], shown["cores"]) == ({}, {}, True, 2)
    assert shown["evaluated"] == ["in its thread"] * 2


def test_worker_without_a_gpu_is_no_rank(tmp_path: Path, nvml: FakeNvml) -> None:
    error = run(tmp_path, nvml, "0", "--cpu-workers", "1")["error"]
    assert "has no GPU, and cudf-polars' DaskEngine makes a rank of each worker" in error


def test_engine_counts_the_workers_with_a_gpu_alone(tmp_path: Path, nvml: FakeNvml) -> None:
    """With the class that the page has for it."""
    page = (ROOT / "docs" / "how-to" / "libraries.md").read_text()
    path = tmp_path / "page.py"
    path.write_text("import hpcgpu\n\nclass GpuWorkers:" + page.partition("class GpuWorkers:")[2].partition("```")[0])
    options = ("--cpu-workers", "1")
    assert run(tmp_path, nvml, "0", *options, script=RANKS, words=(str(path),)) == [3, 2, 2]
