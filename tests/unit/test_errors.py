"""Errors as notebooks show them."""

from __future__ import annotations

import linecache
import pickle
import traceback

import pytest

import hpcgpu
from hpcgpu import errors

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
