"""The energy of a GPU by NVML, and of the CPUs by RAPL: counters that wrap, begin anew, or are not there."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
from fake_nvml import FakeGpu, FakeSlice, compiled
from hypothesis import given
from hypothesis import strategies as st

from hpcgpu.host import nvml
from hpcgpu.host.energy import CpuEnergy, GpuEnergy, growth

GPU, DIVIDED = "0000:06:00.0", "0000:16:00.0"
READS = f"""
import os, pathlib
from hpcgpu.host import nvml
from hpcgpu.host.energy import GpuEnergy
file = pathlib.Path(os.environ["FAKE_NVML_ENERGY"])
file.write_text("{GPU} 1000 -1\\n{DIVIDED} 5000 -1\\n")
gpus = [GpuEnergy(pci) for pci in ("{GPU}", "{DIVIDED}", "0000:99:00.0")]
file.write_text("{GPU} 3500 -1\\n{DIVIDED} 6000 -1\\n")
print([gpu.read() for gpu in gpus])
file.write_text("{GPU} -1 -1\\n{DIVIDED} -1 250000\\n")
print([gpu.read() for gpu in gpus], nvml.energy("{DIVIDED}"), nvml.energy("{GPU}"))
"""


def test_nvml_counts_each_gpu_by_its_address(tmp_path: Path) -> None:
    gpus = [FakeGpu(GPU, "GPU-0"), FakeGpu(DIVIDED, "GPU-1", parts=(FakeSlice("MIG-a"),))]
    env = compiled(tmp_path).environment(gpus) | {"FAKE_NVML_ENERGY": str(tmp_path / "energy")}
    done = subprocess.run([sys.executable, "-c", READS], env=env, capture_output=True, text=True, timeout=60)
    lost = "[2.5, 1.0, None] (None, 250000) (None, None)\n"  # the last answers stay
    assert (done.stdout, done.stderr) == (f"[2.5, 1.0, None]\n{lost}", "")


def answers(monkeypatch: pytest.MonkeyPatch, *values: tuple[int | None, int | None]) -> list[float | None]:
    """Return what a GPU's energy is after each answer of NVML, which are 2 s apart."""
    each, clock = iter(values), itertools.count(0.0, 2.0)
    monkeypatch.setattr(nvml, "energy", lambda _: next(each))
    gpu = GpuEnergy(GPU, lambda: next(clock))
    return [gpu.read() for _ in values[1:]]


def test_counter_that_begins_anew_adds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert answers(monkeypatch, (7000, None), (9000, None), (500, None), (1500, None)) == [2.0, 2.0, 3.0]


def test_power_is_integrated_where_no_counter_is(monkeypatch: pytest.MonkeyPatch) -> None:
    watts = [(None, 100_000), (None, 300_000), (None, None), (None, 300_000)]
    assert answers(monkeypatch, *watts) == [400.0, 400.0, 1600.0]


@given(st.lists(st.integers(0, 99), min_size=1), st.integers(100, 200))
def test_growth_is_the_sum_of_what_was_used(used: list[int], wraps_at: int) -> None:
    readings = [total % wraps_at for total in itertools.accumulate(used)]
    assert sum(map(growth, readings, readings[1:], itertools.repeat(wraps_at))) == sum(used[1:])
    assert all(growth(*pair) >= 0 for pair in itertools.pairwise(readings))


def zone(folder: Path, name: str, kind: str, energy_uj: int, wraps_at: int = 1_000_000_000) -> Path:
    path = folder / name
    path.mkdir(exist_ok=True)
    for file, value in (("name", kind), ("energy_uj", energy_uj), ("max_energy_range_uj", wraps_at)):
        (path / file).write_text(f"{value}\n")
    return path


def test_cpus_are_packages_and_memory_each_once(tmp_path: Path) -> None:
    kinds = {"intel-rapl:0": "package-0", "intel-rapl:0:0": "core", "intel-rapl:0:1": "dram", "intel-rapl:1": "psys"}
    kinds |= {"intel-rapl:2": "package-1", "intel-rapl-mmio:0": "package-0"}
    for name, kind in kinds.items():
        zone(tmp_path, name, kind, 999_000_000)
    cpus = CpuEnergy(tmp_path)
    for name, kind in kinds.items():
        zone(tmp_path, name, kind, 1_000_000)  # after it wrapped
    assert cpus.read() == pytest.approx(6.0)
    assert cpus.read() == pytest.approx(6.0)


def test_counters_that_may_not_be_read_are_unknown(tmp_path: Path) -> None:
    path = zone(tmp_path, "intel-rapl:0", "package-0", 1)
    (path / "energy_uj").unlink()
    (path / "energy_uj").mkdir()  # root may read every file
    assert CpuEnergy(tmp_path).read() is None
    assert CpuEnergy(tmp_path / "none").read() is None
