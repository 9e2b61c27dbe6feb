"""Versions of workers: compared once for each set of them, with distributed's answer. Versions that are too old."""

import ast
import gc
import re
import subprocess
import sys
import tomllib
import weakref
from contextlib import AsyncExitStack
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from crowd import METRICS
from distributed import Client, Scheduler, versions
from hypothesis import given
from hypothesis import strategies as st
from paths import ROOT
from programs import program
from silent_workers import join
from sortedcontainers import SortedDict

from hpcgpu import HpcGpuError
from hpcgpu.batch import Slurm
from hpcgpu.deploy import compat
from hpcgpu.deploy.doctor import login_facts, probes
from hpcgpu.deploy.jobs.batch_client import Submitter
from hpcgpu.model import JobSpec, Patience

PACKAGES = st.dictionaries(st.sampled_from(["dask", "numpy", "python", "lz4"]), st.sampled_from(["1", "2", None]))
VERSIONS = st.one_of(st.none(), st.builds(lambda packages: {"packages": packages}, PACKAGES))


class Packages(dict[str, Any]):
    """Packages that weak references can name."""


@pytest.mark.parametrize("shared", [False, True], ids=["distributed alone", "shared"])
async def test_workers_with_like_packages_keep_one_set_of_them(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is compared once. Whoever else asks for the workers gets all."""
    compared, kept, answer = [], [], versions.error_message

    def spy(ours: Any, workers: dict[str, Any], *rest: Any, **options: Any) -> dict[str, str]:
        compared.append((len(scheduler.workers.items()), len(workers)))
        return answer(ours, workers, *rest, **options)

    async with Scheduler(dashboard_address=":0", port=0) as scheduler, AsyncExitStack() as members:
        if shared:
            compat.share_versions(scheduler)
        monkeypatch.setattr(versions, "error_message", spy)
        for number in range(1, 21):
            comm = await join(scheduler, number, each := Packages(dask="1", numpy="2"))
            kept.append(weakref.ref(each))
            members.push_async_callback(comm.leave)
        odd = await join(scheduler, 30, {"dask": "3"})
        assert "Mismatched versions" in odd.welcome["warning"]
        assert scheduler.workers["tls://127.0.0.1:30"].metrics == METRICS
        assert odd.metrics == ({} if shared else METRICS)  # which frames of its registration hold
        await odd.leave()
        with pytest.warns(versions.VersionMismatchWarning):
            async with Client(scheduler.address, asynchronous=True):
                pass
        del each
        gc.collect()
        assert sum(of() is not None for of in kept) == (1 if shared else 20)
    every = [*range(1, 22), 20]
    assert compared == list(zip(every, [1] * 20 + [2, 1] if shared else every, strict=True))


def in_order(warning: str) -> str:
    """Put versions of a package in order: distributed shows them as Python does a set."""
    return re.sub(r"{(.*?)}", lambda values: str(sorted(values[1].split(", "))), warning)


@given(st.lists(VERSIONS, min_size=1, max_size=3), st.data())
def test_versions_one_of_each_give_distributeds_answer(kinds: list[Any], data: st.DataObject) -> None:
    """Each step is a join with these versions, or the end of the worker of that number."""
    plugins: list[Any] = []
    scheduler = SimpleNamespace(workers=SortedDict(), add_plugin=lambda plugin, name: plugins.append(plugin))
    compat.share_versions(scheduler)
    steps = data.draw(st.lists(st.one_of(st.sampled_from(kinds), st.integers(0, 7)), max_size=12))
    for number, step in enumerate(steps):
        if isinstance(step, int):
            scheduler.workers.pop(str(step), None)
            plugins[0].remove_worker(scheduler, str(step), stimulus_id="test")
        else:
            scheduler.workers[str(number)] = SimpleNamespace(versions=deepcopy(step), metrics={})
            plugins[0].add_worker(scheduler, str(number))
        every = {address: worker.versions for address, worker in scheduler.workers.items()}
        few = {address: worker.versions for address, worker in plugins[0].one_of_each()}
        assert few.items() <= every.items()
        ours, theirs = (versions.error_message(kinds[0], of, kinds[-1])["warning"] for of in (few, every))
        assert in_order(ours) == in_order(theirs)


def test_function_that_asks_twice_gets_all_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a later distributed's might, which wants more of them than their versions."""
    scheduler = SimpleNamespace(workers=SortedDict(a=1), add_plugin=lambda plugin, name: None)
    monkeypatch.setattr(Scheduler, "add_worker", lambda: (scheduler.workers.items(), scheduler.workers.items()))
    monkeypatch.setattr(Scheduler, "add_client", lambda: scheduler.workers.items())
    compat.share_versions(scheduler)
    assert list(map(dict, Scheduler.add_worker())) == [{"a": 1}] * 2
    assert dict(Scheduler.add_client()) == {}


# --- too old

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OLD_PYTHON = "import sys; sys.version_info = (3, 9, 18, 'final', 0); sys.argv = [{0!r}]; import hpcgpu"


@pytest.mark.parametrize(("argv0", "begins"), [("-m", "hpcgpu needs"), ("a.py", "Traceback")])
def test_python_too_old_is_told_in_the_last_line(argv0: str, begins: str) -> None:
    """A command, ``python -m hpcgpu``, shows it alone. RHEL 8's Python reads as far as that."""
    done = subprocess.run([sys.executable, "-c", OLD_PYTHON.format(argv0)], capture_output=True, text=True, cwd=ROOT)
    lowest = PROJECT["requires-python"].removeprefix(">=")
    told = f"hpcgpu needs Python {lowest} or newer; this is 3.9.18, {sys.executable}"
    assert done.stderr.startswith(begins)
    assert done.stderr.splitlines()[-1].removeprefix("ImportError: ") == told
    for name in ("__init__", "__main__"):
        ast.parse((ROOT / f"hpcgpu/{name}.py").read_text(), feature_version=(3, 6))
    assert "\nfrom __future__" not in (ROOT / "hpcgpu/__init__.py").read_text()


@pytest.mark.parametrize(("version", "is_taken"), [("2025.3.0", False), ("2025.4.0", True)])
def test_distributed_too_old_is_told_at_the_import(version: str, is_taken: bool) -> None:
    """As by ``uv pip install --override``; the bound is pyproject.toml's."""
    lowest = next(line.partition(">=")[2] for line in PROJECT["dependencies"] if line.startswith("distributed>"))
    code = f"import dask.base, distributed; distributed.__version__ = {version!r}; from hpcgpu import Checkpoint"
    if not is_taken:  # a name that dask 2025.3 has not
        code = code.replace("; from", "; del dask.base.collections_to_expr; from")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    told = rf"hpcgpu\.errors\.HpcGpuError: hpcgpu needs distributed {lowest} or newer; this is {version}, /\S+: pip .*"
    assert is_taken == (not done.stderr)
    assert is_taken or re.fullmatch(told, done.stderr.splitlines()[-1])


def test_doctor_finds_a_package_that_is_too_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert probes.python().broken == ""
    (info := tmp_path / "distributed-2025.3.0.dist-info").mkdir()
    (info / "METADATA").write_text("Name: distributed\nVersion: 2025.3.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert probes.python().broken == "distributed 2025.3.0 (hpcgpu needs 2025.4 or newer)"


@pytest.mark.parametrize(
    ("version", "is_taken"),
    [("slurm 20.02.7", False), ("slurm 20.11.0", True), ("slurm-wlm 22.05.8", True)],
)
async def test_slurm_too_old_is_told_before_a_submission(
    version: str, is_taken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path / "scontrol", f'[ "$*" = --version ] && echo {version}')
    program(tmp_path / "sbatch", f"touch {tmp_path}/submitted; echo 8")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    submitter = Submitter(Slurm(), JobSpec(name="a", argv=("b",)), print, Patience())
    if is_taken:
        assert (await submitter.submit_head()).id == "8"
    else:
        told = f"hpcgpu needs Slurm 20.11 or newer; this is {version}"
        with pytest.raises(HpcGpuError, match=f"^{told}$"):
            await submitter.submit_head()
        job, _ = login_facts.read({"nodes": 1, "gpus": "sim:1"}, "option --{flag}", "slurm", must=True)
        assert told in str(login_facts.facts(job, "").request)
    assert (tmp_path / "submitted").exists() is is_taken
