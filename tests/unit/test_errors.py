"""Errors as notebooks show them; sizes, durations and limits as people write them, wherever they do."""

import linecache
import pickle
import re
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
import ranks
from hypothesis import given
from hypothesis import strategies as st
from programs import python

import hpcgpu
from hpcgpu import errors
from hpcgpu.config.layers import read_settings
from hpcgpu.config.migration import read_local_cuda
from hpcgpu.deploy import settings
from hpcgpu.deploy.dask_config import check_dask_memory
from hpcgpu.errors import ConfigError
from hpcgpu.model import HostMemory, Settings
from hpcgpu.model.allocation import NOT_TOLD
from hpcgpu.model.settings import SHARE, Limit, read_device_limit
from hpcgpu.plan.binding.workers import plan_memory_limit_bytes
from hpcgpu.spill import GpuSpillBuffer
from hpcgpu.spill.store.buffer import read_limits
from hpcgpu.supervise import reason_of
from hpcgpu.units import format_duration, parse_bytes, parse_duration_s

CELL = "gpus = 4\nhpcgpu.SLURMGPUCluster(gpu=gpus)\n"
BYTES = {"5GB": 5_000_000_000, "512MiB": 512 << 20, 7: 7, "1.5 kB": 1500, "2G": 2_000_000_000}
DURATIONS = {"02:00:00": 7200, "1-12:00:00": 129600, "2h": 7200, "90m": 5400, "30:00": 1800, "1-12:30": 131400}
GIB = 1 << 30
NAN = float("nan")
WORDS: tuple[Any, ...] = (
    *(None, False, "off", 0, 0.0, "0", "0.0", "0 GB"),
    *(0.5, "0.5", " 0.5 ", ".5", "5e-1", np.float32(0.5), 1.0, "1.0"),
    *(1024, "1024", 50_000, 5e9, "5e9", "5GB", "5 GiB", np.int64(5 * GIB), 500 * GIB),
    *("default", "auto"),
    *(True, 1, "1", 8, "8", "800 B", "0.0001KB", 1.5, "1.5", -1, "-1", -0.5, "-1GB"),
    *(NAN, "nan", float("inf"), "1e999", 10**400, "", "5 Gigs", "50%", "none", [1], b"5GB", {}),
)
PARTS = (0, 0.0, False, None, "off", "0", 0.6, "0.6", 1, 1.0, np.float32(0.5), True, -1, 1.5, "1.5", NAN, "60%", [0.6])
SIZES = (0, False, None, "off", "5GB", 5e9, 1 << 40, np.int64(1 << 20), 0.5, "0.5", "0.0001KB", 8, True, -1, NAN, "x")
_MAKE = """
import sys
from hpcgpu.agent.fork_server import LeaderResources
from hpcgpu.errors import ConfigError
from hpcgpu.model import Settings

try:
    with LeaderResources.make(Settings(gpus="sim:1", local_directory=sys.argv[1])):
        pass
except ConfigError as e:
    print(e, "distributed" in sys.modules, sep="\\n")
"""


def test_error_in_a_notebook_shows_the_users_line_and_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """As IPython calls it: exceptions that have ``_render_traceback_`` say themselves what is printed."""
    # as IPython keeps the source of a cell
    monkeypatch.setitem(linecache.cache, "<cell 7>", (len(CELL), None, CELL.splitlines(keepends=True), "<cell 7>"))
    with pytest.raises(hpcgpu.ConfigError) as slip:
        exec(compile(CELL, "<cell 7>", "exec"), {"hpcgpu": hpcgpu, "__name__": "__main__"})
    shown = slip.value._render_traceback_()
    assert shown[0] == "line 2: hpcgpu.SLURMGPUCluster(gpu=gpus)"
    assert shown[1].startswith("ConfigError: unknown option 'gpu', set by keyword gpu of SLURMGPUCluster: did you mean")
    assert shown[2:] == [errors.ALL_FRAMES]
    assert all(line == line.rstrip("\n") for line in shown)


def test_script_that_an_error_ends_shows_its_line_and_the_text(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(
        "import sys\nfrom hpcgpu import *\nassert sys.excepthook is sys.__excepthook__\n"
        "SLURMGPUCluster(nodes=1, gpus='sim:1')\n"
    )

    def shown(**env: str) -> list[str]:
        return ranks.run_command([sys.executable, str(path)], {"PATH": "/nowhere", **env}).stderr.splitlines()

    where, text, *others = [line for line in shown() if not line.startswith("hpcgpu: ")]
    assert where == f"{path}, line 4: SLURMGPUCluster(nodes=1, gpus='sim:1')"
    assert text.startswith("SubmitError: sbatch: there is no such program on this machine")
    assert others == [errors.DOCTOR, "(all frames: HPCGPU_DEBUG=1)"]
    assert "Traceback (most recent call last):" in shown(HPCGPU_DEBUG="1")


def test_worker_without_a_scheduler_says_what_to_give() -> None:
    with pytest.raises(ConfigError, match="the scheduler is missing: GPUWorker"):
        hpcgpu.GPUWorker(gpus="sim:1")


def test_cause_of_an_error_without_a_text_is_the_outer_one() -> None:
    outer, inner = RuntimeError("Worker failed to start."), TimeoutError("start timed out after 60s.")
    outer.__cause__, inner.__cause__ = inner, TimeoutError()
    assert errors.cause_of(outer) is inner
    inner.__cause__ = errors.LaunchError("no room")
    assert errors.cause_of(outer) is inner.__cause__
    assert [errors.message_of(e) for e in (TimeoutError(), MemoryError("16 B"))] == ["TimeoutError", "16 B"]
    assert [reason_of(e) for e in (TimeoutError(), MemoryError("16 B"))] == ["TimeoutError", "MemoryError: 16 B"]


def test_an_error_that_was_never_raised_has_its_text_alone() -> None:
    assert hpcgpu.ConfigError("no")._render_traceback_() == ["ConfigError: no"]


@pytest.mark.parametrize("kind", [errors.JobError, errors.LaunchError, errors.SubmitError, errors.TrustError])
def test_error_of_a_run_ends_with_the_doctors_command(kind: type[errors.HpcGpuError]) -> None:
    """Once, also when it comes from another process, and not within the message of another error."""
    error = pickle.loads(pickle.dumps(kind("gone")))
    outer = kind(f"nothing works: {error}")
    assert errors.whole(kind(f"the log: {errors.whole(error)}")).count(errors.DOCTOR) == 1
    assert str(outer) == "nothing works: gone"
    for shown in (errors.whole(outer), "".join(traceback.format_exception_only(outer)), outer._render_traceback_()[0]):
        assert shown.strip().splitlines()[-1] == errors.DOCTOR
        assert shown.count(errors.DOCTOR) == 1


def test_other_errors_have_no_such_line() -> None:
    for kind in (errors.ConfigError, errors.ParseError, errors.BindingError, errors.SpillError, errors.ClosedError):
        assert errors.whole(kind("no")) == "no"


def test_sizes_and_durations_are_read_or_refused() -> None:
    assert {text: parse_bytes(text) for text in BYTES} == BYTES
    assert {text: parse_duration_s(text) for text in DURATIONS} == DURATIONS
    for no_size in ("5 Gigs", "", "GB", "-1", -1, "1e", True, "1 2"):
        with pytest.raises(ConfigError, match="size"):
            parse_bytes(no_size)
    for no_duration in ("1:99", "1:60:00", "2h30", "", "later", "0", "-1h", "1:2:3:4", "5x", "00:00:00"):
        with pytest.raises(ConfigError, match="not a duration"):
            parse_duration_s(no_duration)


@given(st.integers(1, 10**7))
def test_duration_round_trip(seconds: int) -> None:
    assert parse_duration_s(format_duration(seconds)) == seconds


def outcome(read: Callable[[], int]) -> int | str:
    """Return the bytes, or what is said, without the place where it was set."""
    try:
        return read()
    except ConfigError as error:
        return re.sub(r"; set by .*$| \(set by .*?\)", "", str(error))


def of_cluster(name: str, value: object) -> Settings:
    return read_settings(read_local_cuda({name: value})[0])


@pytest.mark.parametrize("value", WORDS, ids=repr)
def test_a_limit_means_the_same_to_cluster_and_store(value: object, tmp_path: Path) -> None:
    """A store alone knows neither what its process may use of the node nor with how many it shares that."""
    for memory_bytes in (80 * GIB, GIB, 0):
        planned = outcome(
            lambda m=memory_bytes: of_cluster("device_memory_limit", value).device_memory_limit.of_device(m)
        )
        assert outcome(lambda m=memory_bytes: read_limits(value, None, 0.6, None)[0].of_device(m)) == planned
    nothing = HostMemory(0, NOT_TOLD)
    planned = outcome(lambda: plan_memory_limit_bytes(of_cluster("memory_limit", value).memory_limit, nothing, 1) or 0)
    assert outcome(lambda: read_limits(None, value, 1.0, None)[1]) == planned

    for name, limits in {"device_memory_limit": (value, None), "memory_limit": (None, value)}.items():

        def stored(name: str = name) -> int:
            GpuSpillBuffer(**{name: value}, local_directory=str(tmp_path)).close()
            return 0

        read = outcome(lambda limits=limits: read_limits(*limits, 0.6, None)[1])
        assert outcome(stored) == (read if isinstance(read, str) else 0)


@pytest.mark.parametrize(
    ("name", "place", "value"),
    [*(("target", "target", v) for v in PARTS), *(("max_spill", "max-spill", v) for v in SIZES)],
    ids=repr,
)
def test_dasks_configuration_is_read_as_the_stores_keywords(name: str, place: str, value: object) -> None:
    def stored() -> int:
        given = {"target": 0.6, "max_spill": None} | {name: value}
        read_limits(None, None, given["target"], given["max_spill"])
        return 0

    def configured() -> int:
        with dask.config.set({f"distributed.worker.memory.{place}": value}):
            check_dask_memory()
        return 0

    said, configured_said = outcome(stored), outcome(configured)
    assert configured_said == (said.replace(name, f"distributed.worker.memory.{place}", 1) if said else 0)


def test_a_cluster_refuses_what_dasks_configuration_says() -> None:
    with (
        dask.config.set({"distributed.worker.memory.max-spill": "5 Gigs"}),
        pytest.raises(ConfigError, match=r"max-spill: '5 Gigs' is not a size; allowed: .* set by Dask's configuration"),
    ):
        settings.read({"gpus": "sim:1"}, "keyword {name}")


@pytest.mark.parametrize(
    "value", [True, "yes", "true", "1", False, "no", "off", "0", None, 1, 0, "maybe", "", []], ids=repr
)
def test_a_flag_means_the_same(value: Any, tmp_path: Path) -> None:
    def stored() -> int:
        store = GpuSpillBuffer(jit_unspill=value, local_directory=str(tmp_path))
        store.close()
        return store.jit_unspill

    assert outcome(stored) == outcome(lambda: of_cluster("jit_unspill", value).jit_unspill)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("device_memory_limit", 1.5), ("memory_limit", 0.5), ("memory_limit", "5 Gigs"), ("target", -1)),
        *(("max_spill", 0.5), ("jit_unspill", "maybe"), ("quiet", "maybe"), ("trust_local_directory", 2)),
        *(("local_directory", path) for path in ("", 5, "a\nb", "/dev/null/x", "/proc/x", "$NOT_SET_HERE/x")),
    ],
)
def test_a_store_refuses_before_anything_is_there(
    name: str, value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = set(threading.enumerate())
    with pytest.raises(ConfigError) as caught:
        GpuSpillBuffer(**{name: value})
    assert str(caught.value).startswith(name)
    assert not list(tmp_path.iterdir())
    assert set(threading.enumerate()) == before


def test_leader_checks_its_folder_before_it_imports_distributed() -> None:
    """That import takes 1 CPU s and more on a node that is busy."""
    said, imported = python(_MAKE, "/proc/x", check=True).stdout.splitlines()
    assert "local_directory='/proc/x' cannot hold the files of a run" in said
    assert imported == "False"


def test_a_share_is_divided_and_a_limit_reads_itself_once() -> None:
    assert SHARE.bytes_of(8 * GIB, "x=1", "it", workers=4) == 2 * GIB
    assert read_device_limit(read_device_limit("0.5")) == Limit(0.5)
    assert [bool(Limit(v)) for v in (0, 0.5, 1, "auto")] == [False, True, True, True]
    assert [Limit(v).nbytes for v in (0, 0.5, 5000, "auto")] == [0, 0, 5000, 0]
    for wrong in (-1, 1.5, 0.0, True, "0.5", None):
        with pytest.raises(ConfigError, match="no limit"):
            Limit(wrong)  # type: ignore[arg-type]
