"""The table of jobs, in a terminal and in a notebook."""

from __future__ import annotations

import pytest

from hpcgpu.deploy.jobs.rows import Jobs
from hpcgpu.plan.jobs.job import Job

JOBS = Jobs((Job(id="12", text="UP 2/2", log="/home/me/slurm-12.out"),))


@pytest.mark.parametrize("notebook", [False, True])
def test_it_is_one_text_wherever_it_is_shown(
    notebook: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A Console of rich takes what it is to write to a file for the notebook, and shows it there (15.0)."""
    monkeypatch.setattr("rich.console._is_jupyter", lambda: notebook)
    header, row = str(JOBS).splitlines()
    assert header.split() == ["job", "state", "has", "nodes", "log"]
    assert row.split() == ["12", "UP", "2/2", "workers", "1", "/home/me/slurm-12.out"]
    assert JOBS._repr_html_().count("UP 2/2") == 1
    assert capsys.readouterr().out == ""
