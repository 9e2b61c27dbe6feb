"""A run on GPUs that NVML shows: which of them each worker is given. The NVML is a fake, the rest is real."""

import json
import re
from dataclasses import replace
from pathlib import Path

import fake_cuda
import pytest
import ranks
from fake_nvml import FakeGpu, FakeNvml, FakeSlice, compiled
from paths import TOPOLOGIES

TURIN = TOPOLOGIES / "turin-4gpu-nvml.xml"
WHOLE = [FakeGpu(pci, f"GPU-{i}", size_mib=1024) for i, pci in enumerate(("0000:06:00.0", "0000:16:00.0"))]
SCRIPT = """
    import hpcgpu, json
    from hpcgpu.report.workers import examine
    with Client() as client:
        found = hpcgpu.bindings(client)
        seen = client.run(lambda: (os.environ["CUDA_VISIBLE_DEVICES"], os.environ["CUDA_DEVICE_ORDER"]))
        memory = hpcgpu.memory(client)
        print(json.dumps({
            "memory": [(w.device_source, w.device_used_bytes, w.device_capacity_bytes >> 20) for w in memory.workers],
            "used": memory.total.device_used_bytes,
            "devices": sorted(seen.values()),
            "homes": [w.spec.gpu.numa_node for w in found.workers],
            "limits": [w.spec.device_memory_limit_bytes >> 20 for w in found.workers],
            "ports": [dict(w.spec.env).get("UCX_NET_DEVICES") for w in found.workers],
            "differences": found.differences,
            "doctor": [(f.name, f.verdict.value, f.seen) for f in examine(found.workers)],
        }))
"""
# The GPUs' counters, which the script sets, in J; two workers share each GPU, and one of them dies.
ENERGY = """
    import json
    from pathlib import Path
    def use(*joules):
        file = Path(os.environ["FAKE_NVML_ENERGY"])
        lines = [f"{pci} {1000 * j} -1" for pci, j in zip(("0000:06:00.0", "0000:16:00.0"), joules)]
        file.with_suffix(".new").write_text("\\n".join(lines))
        file.with_suffix(".new").rename(file)
    def energy(client):
        return client.run_on_scheduler(lambda dask_scheduler: sum(
            gpu.joules for gpu in dask_scheduler.plugins["hpcgpu-usage"].energy().gpus.values()))
    def until(is_so):
        while not is_so():
            time.sleep(0.05)
    if __name__ == "__main__":
        with Client() as client:
            use(3_600, 7_200)
            until(lambda: energy(client) == 10_800)
            gone, *_ = addresses = list(client.scheduler_info(n_workers=-1)["workers"])
            dying = client.submit(os._exit, 1, workers=[gone])
            until(lambda: gone not in client.scheduler_info(n_workers=-1)["workers"])
            client.wait_for_workers(len(addresses))
            use(5_400, 14_400)
"""


@pytest.fixture(scope="module")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> FakeNvml:
    return compiled(tmp_path_factory.mktemp("nvml"))


def run(folder: Path, nvml: FakeNvml, gpus: list[FakeGpu], count: int = 1, **more: str):
    env = {**nvml.environment(gpus), "HWLOC_XMLFILE": str(TURIN), **more}
    done = ranks.run(ranks.script(folder, SCRIPT), options=(), ranks=count, env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def test_whole_gpus_stay_visible_the_own_one_first(tmp_path: Path, nvml: FakeNvml) -> None:
    found, _ = run(tmp_path, nvml, WHOLE, count=3)
    assert found["devices"] == [["GPU-0,GPU-1", "PCI_BUS_ID"], ["GPU-1,GPU-0", "PCI_BUS_ID"]]
    assert found["homes"] == [1, 2]  # NVML's GPUs, found in hwloc's topology by PCI address
    assert found["limits"] == [819, 819]
    assert found["ports"] == ["mlx5_4:1", "mlx5_5:1"]
    assert (found["differences"], found["doctor"]) == ({}, [["workers", "ok", "2 workers as planned"]])
    # nothing of these GPUs' memory is in use, which NVML says where no pool does
    assert found["memory"] == [["NVML", 0, 1024]] * 2
    assert found["used"] == 0  # a sum, since no GPU is counted twice


def test_contexts_on_other_gpus_are_said_and_are_differences(tmp_path: Path) -> None:
    """As those of a library that takes all GPUs that it sees."""
    nvml = compiled(tmp_path)
    fake_cuda.compiled(tmp_path)
    uuids = [f"GPU-{i * 8}-1111-2222-3333-444444444444" for i in "ab"]
    gpus = [replace(gpu, uuid=uuid) for gpu, uuid in zip(WHOLE, uuids, strict=True)]
    shown, stderr = run(tmp_path, nvml, gpus, FAKE_CUDA_DEVICES="2")
    text = "it has a CUDA context on other GPUs, too (devices 1), and takes their memory"
    assert list(shown["differences"].values()) == [[text]] * 2
    named = [[name, "warning", text] for name in shown["differences"]]
    assert shown["doctor"] == [*named, ["workers", "ok", "0 workers as planned"]]
    assert sorted(re.findall(rf"worker (\S+) is not as planned: {re.escape(text)}", stderr)) == [*shown["differences"]]


def test_what_the_launcher_granted_is_a_fact_to_plan_from(tmp_path: Path, nvml: FakeNvml) -> None:
    found, stderr = run(tmp_path, nvml, WHOLE, CUDA_VISIBLE_DEVICES="1", UCX_NET_DEVICES="mlx5_0:1")
    assert found["devices"] == [["GPU-1", "PCI_BUS_ID"]]
    assert found["ports"] == [None]  # the user's own stays
    assert "1 worker on 1 node ready" in stderr


def test_energy_of_a_run_is_that_of_its_gpus_counters(tmp_path: Path, nvml: FakeNvml) -> None:
    file = tmp_path / "energy"
    file.write_text("0000:06:00.0 0 -1\n0000:16:00.0 0 -1\n")
    env = {**nvml.environment(WHOLE), "HWLOC_XMLFILE": str(TURIN), "FAKE_NVML_ENERGY": str(file)}
    options = ("--workers-per-gpu", "2", "--carbon-g-per-kwh", "100")
    done = ranks.run(ranks.script(tmp_path, ENERGY), options=options, env=env)
    assert done.returncode == 0, done.stderr
    # 5.4 kJ and 14.4 kJ
    assert "summary: energy: 0.0055 kWh by the 2 GPUs, " in done.stderr
    assert " g of CO2 at 100 g/kWh\n" in done.stderr


def test_updated_driver_is_an_error_but_not_for_simulated_gpus(tmp_path: Path, nvml: FakeNvml) -> None:
    env = nvml.environment(WHOLE) | {"FAKE_NVML_INIT": "18"}
    path = ranks.script(tmp_path, "if __name__ == '__main__':\n    print(Client().submit(sum, [1, 2]).result())")
    done = ranks.run(path, options=(), env=env)
    assert done.returncode != 0
    assert "no GPU can be opened" in done.stderr
    assert "the old one is still loaded: the node must be started anew" in done.stderr
    simulated = ranks.run(path, env=env)
    assert (simulated.returncode, simulated.stdout) == (0, "3\n"), simulated.stderr


def test_a_worker_on_a_slice_sees_nothing_else(tmp_path: Path, nvml: FakeNvml) -> None:
    slices = (FakeSlice("MIG-a", size_mib=512), FakeSlice("MIG-b", size_mib=256))
    found, _ = run(tmp_path, nvml, [WHOLE[0], FakeGpu("0000:16:00.0", "GPU-1", parts=slices)])
    assert found["devices"] == [["GPU-0", "PCI_BUS_ID"], ["MIG-a", "PCI_BUS_ID"], ["MIG-b", "PCI_BUS_ID"]]
    assert found["homes"] == [1, 2, 2]
    assert found["limits"] == [819, 409, 204]  # 0.8 of its own memory
