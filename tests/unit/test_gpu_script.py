"""``scripts/gpu.py`` runs its parts one after the other; one that fails ends no other."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from paths import ROOT


def test_run_reports_parts_that_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import gpu

    monkeypatch.setattr(gpu, "ASK", {"cupy": "import no_such_library"})
    parts = [
        gpu.Part("wrong", ("-c", "import sys; sys.exit('it went wrong')"), 20),
        gpu.Part("without", ("-c", "raise AssertionError"), 20, "cupy"),
        gpu.Part("right", ("-c", 'print(\'{"bench": "b", "value": 1.5}\')'), 20),
    ]
    assert gpu.run(tmp_path, parts, dict(os.environ), time.monotonic()) == 1
    report = json.loads((tmp_path / "gpu.json").read_text())
    outcomes = {part["name"]: (part["outcome"], part["exit_code"]) for part in report["parts"]}
    assert outcomes == {"wrong": ("failed", 1), "without": ("not done", None), "right": ("done", 0)}
    assert report["parts"][-1]["figures"] == [{"bench": "b", "value": 1.5}]
    for part in gpu.PARTS:
        assert [word for word in part.arguments if "/" in word and not (ROOT / word).exists()] == []
