"""Errors as notebooks show them, and sizes and durations as people write them."""

from __future__ import annotations

import linecache
import pickle
import traceback

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hpcgpu
from hpcgpu import errors
from hpcgpu.errors import ConfigError
from hpcgpu.units import format_duration, parse_bytes, parse_duration_s

CELL = "gpus = 4\nhpcgpu.SLURMGPUCluster(gpu=gpus)\n"


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


def test_an_error_that_was_never_raised_has_its_text_alone() -> None:
    assert hpcgpu.ConfigError("no")._render_traceback_() == ["ConfigError: no"]


@pytest.mark.parametrize("kind", [errors.JobError, errors.LaunchError, errors.SubmitError, errors.TrustError])
def test_error_of_a_run_ends_with_the_doctors_command(kind: type[errors.HpcGpuError]) -> None:
    """Once, also when it comes from another process, and not within the message of another error."""
    error = pickle.loads(pickle.dumps(kind("gone")))
    outer = kind(f"nothing works: {error}")
    assert str(outer) == "nothing works: gone"
    for shown in (errors.whole(outer), "".join(traceback.format_exception_only(outer)), outer._render_traceback_()[0]):
        assert shown.strip().splitlines()[-1] == errors.DOCTOR
        assert shown.count(errors.DOCTOR) == 1


@pytest.mark.parametrize("kind", [errors.ConfigError, errors.ParseError, errors.BindingError, errors.SpillError])
def test_other_errors_have_no_such_line(kind: type[errors.HpcGpuError]) -> None:
    assert errors.whole(kind("no")) == "no"


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5_000_000_000), ("512MiB", 512 << 20), (7, 7), ("1.5 kB", 1500), ("2G", 2_000_000_000)]
)
def test_bytes(text: int | str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["5 Gigs", "", "GB", "-1", -1, "1e", True, "1 2"])
def test_bytes_refused(text: int | str) -> None:
    with pytest.raises(ConfigError, match="size"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("02:00:00", 7200), ("1-12:00:00", 129600), ("2h", 7200), ("90m", 5400), ("30:00", 1800), ("1-12:30", 131400)],
)
def test_durations(text: str, seconds: int) -> None:
    assert parse_duration_s(text) == seconds


@pytest.mark.parametrize("text", ["2h30", "", "later", "0", "-1h", "1:2:3:4", "5x", "00:00:00"])
def test_durations_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not a duration"):
        parse_duration_s(text)


@given(st.integers(1, 10**7))
def test_duration_round_trip(seconds: int) -> None:
    assert parse_duration_s(format_duration(seconds)) == seconds
