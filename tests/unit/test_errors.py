"""Errors as notebooks show them, and sizes and durations as people write them."""

from __future__ import annotations

import linecache
import pickle
import traceback
from typing import Any

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
    ("read", "text", "expected"),
    [
        *((parse_bytes, "5GB", 5_000_000_000), (parse_bytes, "512MiB", 512 << 20), (parse_bytes, 7, 7)),
        *((parse_bytes, "1.5 kB", 1500), (parse_bytes, "2G", 2_000_000_000)),
        *((parse_bytes, text, "size") for text in ("5 Gigs", "", "GB", "-1", -1, "1e", True, "1 2")),
        *(
            (parse_duration_s, "02:00:00", 7200),
            (parse_duration_s, "1-12:00:00", 129600),
            (parse_duration_s, "2h", 7200),
        ),
        *((parse_duration_s, "90m", 5400), (parse_duration_s, "30:00", 1800), (parse_duration_s, "1-12:30", 131400)),
        *(
            (parse_duration_s, text, "not a duration")
            for text in ("2h30", "", "later", "0", "-1h", "1:2:3:4", "5x", "00:00:00")
        ),
    ],
)
def test_sizes_and_durations_are_read_or_refused(read: Any, text: Any, expected: int | str) -> None:
    if isinstance(expected, int):
        assert read(text) == expected
    else:
        with pytest.raises(ConfigError, match=expected):
            read(text)


@given(st.integers(1, 10**7))
def test_duration_round_trip(seconds: int) -> None:
    assert parse_duration_s(format_duration(seconds)) == seconds
