"""The pages of docs/coming-from: what they show runs, and their tables name what there is."""

from __future__ import annotations

import inspect
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ranks
import yaml
from dask_jobqueue.slurm import SLURMJob
from dask_mpi import execute, initialize
from distributed import Client, LocalCluster
from lab import Lab

import hpcgpu
from hpcgpu.config.foreign import DASK_CUDA, FOREIGN
from hpcgpu.config.jobqueue import ignored, translate
from hpcgpu.config.layers import BY_NAME
from hpcgpu.model.settings import options, user_name

pytestmark = pytest.mark.mpi

FOLDER = Path(__file__).parents[1] / "docs" / "coming-from"
PAGES = {path.stem: path.read_text() for path in FOLDER.iterdir()}
OURS = {user_name(f) for f in options()} | set(hpcgpu.__all__)


def blocks(page: str, kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", PAGES[page], re.S)


def after(diff: str) -> str:
    """What stands there when one has switched."""
    return "".join(line[1:] for line in diff.splitlines(keepends=True) if not line.startswith("-"))


def before(diff: str) -> str:
    return "".join(line[1:] for line in diff.splitlines(keepends=True) if not line.startswith("+"))


def rows(page: str) -> list[list[str]]:
    lines = [line for line in PAGES[page].splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def run(argv: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    env = ranks.environment(PATH=f"{ranks.BIN}:/usr/bin:/bin")
    pipes = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL}
    return subprocess.run(argv, cwd=folder, env=env, timeout=150, **pipes)


@pytest.mark.mpi
@pytest.mark.parametrize(("diff", "line"), [(0, 0), (1, 2)], ids=["its ranks", "our ranks"])
def test_dask_mpi(tmp_path: Path, diff: int, line: int) -> None:
    text = after(blocks("dask-mpi", "diff")[diff])
    (tmp_path / "script.py").write_text(text)
    done = run(shlex.split(blocks("dask-mpi", "bash")[line]), tmp_path)
    assert done.stdout == "6\n", done.stderr


@pytest.mark.mpi
def test_dask_mpis_command(tmp_path: Path) -> None:
    argv, file = shlex.split(blocks("dask-mpi", "bash")[1]), tmp_path / "scheduler.json"
    env = ranks.environment(PATH=f"{ranks.BIN}:/usr/bin:/bin")
    with subprocess.Popen(argv, cwd=tmp_path, env=env, stderr=subprocess.DEVNULL) as process:
        try:
            while not file.exists():
                assert process.poll() is None
                time.sleep(0.05)
            with Client(scheduler_file=str(file), timeout=60) as client:
                client.wait_for_workers(2, timeout=90)
                assert not hpcgpu.bindings(client).differences
        finally:
            process.terminate()
            process.wait(30)


def test_local_cuda_cluster(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(after(blocks("dask-cuda", "diff")[0]))
    done = run([sys.executable, "script.py"], tmp_path)
    assert done.stdout == "6\n", done.stderr


def test_dask_cuda_worker(tmp_path: Path) -> None:
    argv = shlex.split(after(blocks("dask-cuda", "diff")[1]))
    with LocalCluster(n_workers=0, dashboard_address=None) as cluster, Client(cluster) as client:
        argv = [cluster.scheduler_address if word.startswith("tcp://") else word for word in argv]
        env = ranks.environment(PATH=f"{ranks.BIN}:/usr/bin:/bin")
        with subprocess.Popen(argv, env=env, stderr=subprocess.DEVNULL) as process:
            client.wait_for_workers(2, timeout=60)
            assert len(hpcgpu.bindings(client).workers) == 2
            process.terminate()


@pytest.mark.slurm
@pytest.mark.parametrize("diff", [0, 1], ids=["its cluster", "our cluster"])
def test_dask_jobqueue(slurm_lab: Lab, diff: int) -> None:
    slurm_lab.write("coming.py", after(blocks("dask-jobqueue", "diff")[diff]))
    done = slurm_lab.exec(slurm_lab.login, ["python", "coming.py"], timeout=150)
    assert done.stdout.splitlines()[-1:] == ["6"], done.stderr


@pytest.mark.slurm
def test_slurm_runner(slurm_lab: Lab) -> None:
    slurm_lab.write("script.py", after(blocks("dask-jobqueue", "diff")[2]))
    done = slurm_lab.exec(slurm_lab.login, shlex.split(blocks("dask-jobqueue", "bash")[0]), timeout=150)
    assert (done.returncode, done.stdout) == (0, "6\n"), done.stderr


def test_the_section_of_the_page_is_read_as_it_says() -> None:
    [text] = blocks("dask-jobqueue", "yaml")
    section = yaml.safe_load(text)["jobqueue"]["slurm"]
    values, _ = translate(section, 4)
    assert values == {"queue": "gpu", "account": "m0000", "walltime": "02:00:00", "cores_per_gpu": 16}
    assert [said.split()[0] for said in ignored(section)] == ["processes"]


@pytest.mark.parametrize("page", PAGES)
def test_every_example_is_tried_and_is_python_before_too(page: str) -> None:
    tried = {"dask-mpi": (2, 3, 0, 0), "dask-cuda": (2, 0, 0, 0), "dask-jobqueue": (3, 1, 1, 1)}[page]
    assert tuple(len(blocks(page, kind)) for kind in ("diff", "bash", "yaml", "python")) == tried
    assert PAGES[page].count("```") == 2 * sum(tried)
    for diff in blocks(page, "diff"):
        if "import" in diff:
            compile(before(diff), page, "exec")


@pytest.mark.parametrize(("page", "row"), [(page, row) for page in PAGES for row in rows(page)], ids=str)
def test_a_row_names_what_there_is(page: str, row: list[str]) -> None:
    there, here, _ = row
    for name in re.findall(r"`([a-z_]+)`", here):
        assert name in OURS
    # what is the same here is taken under their name, too; what is not is answered
    for name in re.findall(r"`([a-z_]+)`", there):
        assert name in BY_NAME or name in FOREIGN or page == "dask-mpi"


def test_all_their_keywords_have_a_row() -> None:
    named = {page: set(re.findall(r"[A-Za-z_]+", " ".join(row[0] for row in rows(page)))) for page in PAGES}
    jobqueue = {n for c in SLURMJob.__mro__[:2] for n in inspect.signature(c.__init__).parameters}
    assert jobqueue - {"self", "scheduler", "name", "base_class_kwargs"} <= named["dask-jobqueue"]
    mpi = {n for f in (initialize, execute) for n in inspect.signature(f).parameters}
    assert mpi - {"function", "client_function", "client_args", "client_kwargs", "kwargs"} <= named["dask-mpi"]
    memory = (FOLDER.parent / "reference" / "memory-options.md").read_text()
    assert {n for n in DASK_CUDA if n not in named["dask-cuda"] and f"`{n}`" not in memory} == set()
