"""The examples of libraries, the same on distributed's cluster and on each kind of ours, over TLS."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import ranks
from distributed import Client, LocalCluster
from lab import CHECKOUT, Lab, LabUnavailable
from library_examples import NAMES, results
from paths import ROOT, SUPPORT
from waiting import scaled

from hpcgpu import LocalGPUCluster

pytestmark = pytest.mark.timeout(400)  # of which the first test of a process has also the results to compare with
EXAMPLES = ROOT / "examples" / "libraries"
# PyTorch sees devices where its worker was given some, as on a machine that has them.
DEVICES = "import os, torch; torch.cuda.is_available = lambda: os.environ.get('CUDA_VISIBLE_DEVICES') != ''"


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results on LocalCluster."""
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster, Client(cluster) as client:
        return results(client, EXAMPLES, tmp_path_factory.mktemp("local"))


def check(computed: dict[str, Any], expected: dict[str, Any]) -> None:
    """All results equal the expected ones; sums of floats may come in another order."""
    assert all(address.startswith("tls://") for address in [computed["scheduler"], *computed["workers"]])
    assert len(computed["workers"]) == 2
    for name in NAMES:
        mine, theirs = computed[name], expected[name]
        if isinstance(theirs, dict):
            assert mine.keys() == theirs.keys()
            mine, theirs = list(mine.values()), list(theirs.values())
        for one, other in zip(mine, theirs, strict=True):
            assert flat(one) == pytest.approx(flat(other), rel=1e-4), name


def flat(value: Any) -> list[float]:
    return [x for part in value for x in flat(part)] if isinstance(value, list) else [value]


def test_examples_on_local_gpu_cluster_equal_local_cluster(expected: dict[str, Any], tmp_path: Path) -> None:
    with LocalGPUCluster(gpus="sim:2", nthreads=1) as cluster, Client(cluster) as client:
        check(results(client, EXAMPLES, tmp_path), expected)


def test_examples_on_a_gang_equal_local_cluster(expected: dict[str, Any], tmp_path: Path) -> None:
    options, path = ("--gpus", "sim:2", "--nthreads", "1"), tmp_path / "results.json"
    words = (str(EXAMPLES), str(tmp_path), str(path))
    done = ranks.run(SUPPORT / "library_examples.py", *words, options=options, ranks=2, timeout=scaled(250))
    assert done.returncode == 0, done.stdout + done.stderr
    check(json.loads(path.read_text()), expected)


@pytest.mark.timeout(900)
def test_examples_on_an_elastic_cluster_equal_local_cluster() -> None:
    lab = Lab()
    try:
        lab.build()
    except LabUnavailable as error:
        pytest.skip(f"no Slurm lab here: {error}")
    code = f"""
import json, sys
from pathlib import Path
sys.path.insert(0, "{CHECKOUT}/tests/support")
from distributed import Client, LocalCluster
from hpcgpu import SLURMGPUCluster
from library_examples import results
local = dict(n_workers=2, threads_per_worker=1, dashboard_address=None)
elastic = dict(gpus="sim:1", nthreads=1, walltime="01:00:00", shape="elastic", nodes=1)
def on(cluster, jobs=0):
    with cluster, Client(cluster) as client:
        if jobs:
            cluster.scale(jobs=jobs)
        client.wait_for_workers(2, timeout=120)
        return results(client, Path("{CHECKOUT}/examples/libraries"), Path.cwd() / type(cluster).__name__)
if __name__ == "__main__":
    ours = SLURMGPUCluster(**elastic, job_extra_directives=["--exclusive"])
    print("FACTS", json.dumps({{"computed": on(ours, jobs=1), "expected": on(LocalCluster(**local))}}))
"""
    with lab.down_at_the_end():
        lab.up()
        lab.lend(".venv-libraries", "libraries", ("xgboost", "optuna"))
        facts = lab.facts(code, "/home/hpc/libraries/bin/python", timeout=scaled(700))
    check(facts["computed"], facts["expected"])
    assert len({address.rpartition(":")[0] for address in facts["computed"]["workers"]}) == 2  # nodes


def test_torch_ranks_are_workers_with_a_gpu_whatever_their_pool() -> None:
    """A pool's workers have its resource alone, with a GPU or without."""
    example = runpy.run_path(str(EXAMPLES / "torch_ddp.py"), run_name="__main__ of a test")
    options: dict[str, Any] = {"nthreads": 1, "cpu_workers": 1, "resources": {"pool": 1}}
    with LocalGPUCluster(gpus="sim:2", **options) as cluster, Client(cluster) as client:
        client.run(exec, DEVICES)
        names = {address: worker["name"] for address, worker in client.scheduler_info(n_workers=-1)["workers"].items()}
        with_gpu = [worker.name for worker in cluster.bindings().workers if worker.gpu]
        assert [names[address] for address in example["ranks"](client, True)] == with_gpu
        assert len(with_gpu) == 2
        assert len(example["ranks"](client, False)) == 3
        assert example["compute"](client) == pytest.approx([1, -2, 3, 0.5], abs=0.01)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_example_runs_by_its_first_line(path: Path, tmp_path: Path) -> None:
    argv = (
        path.read_text().splitlines()[0].removeprefix("# hpcgpu ").replace("examples/", f"{EXAMPLES.parent}/").split()
    )
    done = ranks.run_command([str(ranks.BIN / "hpcgpu"), *argv], timeout=scaled(150), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
