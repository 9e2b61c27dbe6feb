"""Errors as notebooks show them."""

from __future__ import annotations

import linecache

import pytest

import hpcgpu

CELL = "gpus = 4\nhpcgpu.SLURMGPUCluster(gpu=gpus)\n"


def test_a_notebook_shows_the_line_and_the_text_and_none_of_our_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """As IPython calls it: exceptions that have ``_render_traceback_`` say themselves what is printed."""
    # as IPython keeps the source of a cell
    monkeypatch.setitem(linecache.cache, "<cell 7>", (len(CELL), None, CELL.splitlines(keepends=True), "<cell 7>"))
    with pytest.raises(hpcgpu.ConfigError) as slip:
        exec(compile(CELL, "<cell 7>", "exec"), {"hpcgpu": hpcgpu, "__name__": "__main__"})
    shown = slip.value._render_traceback_()
    assert shown[0] == "line 2: hpcgpu.SLURMGPUCluster(gpu=gpus)"
    assert shown[1].startswith("ConfigError: unknown option 'gpu', set by keyword gpu of SLURMGPUCluster: did you mean")
    assert len(shown) == 2
    assert all(line == line.rstrip("\n") for line in shown)


def test_an_error_that_was_never_raised_has_its_text_alone() -> None:
    assert hpcgpu.JobError("gone")._render_traceback_() == ["JobError: gone"]
