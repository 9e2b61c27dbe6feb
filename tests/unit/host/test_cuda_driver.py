"""Which GPU is the first of a worker's process, by the driver; on one that stands in for NVIDIA's."""

import subprocess
import sys
from pathlib import Path

import fake_cuda
from waiting import scaled

OURS, OTHER = (f"GPU-{i * 8}-1111-2222-3333-444444444444" for i in "ab")
WORKER = """
import ctypes, os, sys
from hpcgpu.deploy.processes.worker import check_device, open_context
from hpcgpu.errors import LaunchError
from hpcgpu.model import Binding, CpuSet, Gpu, WorkerSpec

def spec(name, **facts):
    gpu = Gpu(uuid=name, pci="0000:01:00.0", memory_bytes=1 << 30, numa_node=0, **facts)
    return WorkerSpec(name="n1-0", binding=Binding(CpuSet([0]), (gpu,)))

ours, early = sys.argv[1], sys.argv[2] == "early"
driver = ctypes.CDLL("libcuda.so.1")
if early:
    driver.cuInit(0)
os.environ["CUDA_VISIBLE_DEVICES"] = ours
try:
    check_device(spec(ours))
    print("the planned GPU")
except LaunchError as e:
    print(e)
check_device(spec("MIG-1", mig="1g.5gb"))
context = ctypes.c_void_p()
for address in ("tls://10.0.0.1:1", "ucx://10.0.0.1:1"):
    open_context(address, spec(ours))
    driver.cuCtxGetCurrent(ctypes.byref(context))
    print(address[:3], bool(context.value))
"""


def worker(folder: Path, when: str, **environ: str) -> tuple[str, str]:
    env = {**fake_cuda.compiled(folder), "CUDA_VISIBLE_DEVICES": OTHER, **environ}
    argv = [sys.executable, "-c", WORKER, OURS, when]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=scaled(60), check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_worker_on_its_own_gpu_starts_and_has_a_context_for_ucx(tmp_path: Path) -> None:
    assert worker(tmp_path, "late") == ("the planned GPU\ntls False\nucx True\n", "")


def test_worker_on_another_gpu_is_refused_with_both_names(tmp_path: Path) -> None:
    said, _ = worker(tmp_path, "early")
    assert said.startswith(f"worker n1-0 is planned on {OURS} at 0000:01:00.0, but")
    assert OTHER in said


def test_contexts_on_other_gpus_are_said(tmp_path: Path) -> None:
    out, err = worker(tmp_path, "late", FAKE_CUDA_DEVICES="3")
    assert out.startswith("the planned GPU")
    assert "devices 1, 2" in err


def test_a_driver_that_refuses_is_named_with_its_code(tmp_path: Path) -> None:
    env = {**fake_cuda.compiled(tmp_path), "FAKE_CUDA_FAIL": "cuInit=100"}
    code = "from hpcgpu.host import cuda_driver; cuda_driver.first_device()"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=scaled(60))
    assert "LaunchError: the CUDA driver refuses this process: cuInit" in done.stderr
    assert "100" in done.stderr
