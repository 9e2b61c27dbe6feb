"""``scripts/gpu.py`` and ``gpu_wheels.py``: parts that fail, the report, and the wheels that a machine lacks."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from paths import ROOT


def loaded(path: str) -> ModuleType:
    """Load a script by the name by which others import it, since dataclasses look for their module."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def wheels() -> ModuleType:
    return loaded("scripts/gpu_wheels.py")


@pytest.fixture(scope="module")
def gpu(wheels: ModuleType) -> ModuleType:
    return loaded("scripts/gpu.py")


FIGURE = '{"bench": "b", "case": "c | d", "measure": "m", "who": "us", "value": 1.5, "unit": "s", "runs": 3}'
NO_FIGURE = '{"bench": "b", "value": null, "why": "not measured: no GPU"}'


def test_run_reports_each_part_and_one_failure_ends_no_other(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "ASK", {"here": "print('1.0, a GPU')", "cupy": "import no_such_library"})
    parts = [
        gpu.Part("wrong", ("-c", "import sys; print('its output'); sys.exit('it went wrong')"), 20),
        gpu.Part("long", ("-c", "import time; time.sleep(60)"), 0.1),
        gpu.Part("right", ("-c", f"print('''{FIGURE}'''); print('{NO_FIGURE[:5]}')"), 20, "here"),
        gpu.Part("without", ("-c", "raise AssertionError"), 20, "cupy"),
        gpu.Part("empty", ("-c", f"print('''{NO_FIGURE}''')"), 20),
    ]
    assert gpu.run(tmp_path / "out", parts, dict(os.environ), time.monotonic()) == 1
    report = json.loads((tmp_path / "out/gpu.json").read_text())
    outcomes = {p["name"]: (p["outcome"], p["exit_code"], p["why"]) for p in report["parts"]}
    assert outcomes["wrong"] == ("failed", 1, "exit code 1: it went wrong")
    assert outcomes["long"][:2] == ("out of time", None)
    assert outcomes["right"][:2] == ("done", 0)
    assert outcomes["without"] == ("not done", None, "cupy: ModuleNotFoundError: No module named 'no_such_library'")
    assert outcomes["empty"] == ("not done", 0, "not measured: no GPU")
    assert report["parts"][2]["figures"] == [json.loads(FIGURE)]
    page = (tmp_path / "out/gpu.md").read_text()
    assert "| b | c \\| d | m | us | 1.5 | s | 3 |" in page
    assert "## wrong" in page
    assert "## right" not in page
    late = time.monotonic() - gpu.TOTAL_S
    assert gpu.run(tmp_path, [gpu.Part("late", ("-c", "raise AssertionError"), 20)], {}, late) == 1
    assert json.loads((tmp_path / "gpu.json").read_text())["parts"][0]["outcome"] == "out of time"


def test_parts_end_within_nine_minutes_the_most_valuable_first(gpu: ModuleType) -> None:
    assert gpu.TOTAL_S + 2 * gpu.ENDING_S <= 540
    for part in gpu.PARTS:  # what is named is there
        assert [word for word in part.arguments if "/" in word and not (ROOT / word).exists()] == []
        assert part.limit_s <= 90
    files = [p.name for p in gpu.PARTS if p.name.startswith("tests/")]
    assert {ROOT / name for name in files} == set((ROOT / "tests/gpu").rglob("test_*.py"))
    assert [p.name for p in gpu.PARTS[: len(files)]] == files
    assert files[0].endswith("test_spill_gpu.py")


def test_read_tests_counts_with_the_reasons_of_skips(gpu: ModuleType) -> None:
    xml = """<testsuites><testsuite><testcase name="a"/><testcase name="b"><failure message="x"/></testcase>
    <testcase name="d"><skipped message="no CuPy"/></testcase></testsuite></testsuites>"""
    assert str(gpu.read_tests(xml)) == "1 passed; 1 failed: b; 1 skipped: no CuPy"
    for passed, failed, code, outcome in [(3, (), 0, "done"), (0, (), 0, "not done"), (3, ("b",), 1, "failed")]:
        result = gpu.Result("tests", "pytest", 10, exit_code=code, tail="words")
        gpu.judge(result, gpu.Tests(passed, failed, {"no GPU": 2}))
        assert result.outcome == outcome


def wheel(folder: Path, name: str, version: str, *requires: str) -> Path:
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {r}" for r in requires)]
        archive.writestr(f"{name}-{version}.dist-info/METADATA", "\n".join(lines) + "\n\n")
    return path


def test_wheels_lacking_are_those_that_are_absent_or_too_old(wheels: ModuleType, tmp_path: Path) -> None:
    versions = {"click": "8.5.1", "pyyaml": "6.0.3", "numpy": "2.4.6", "wrapt": "2.5.2", "unasked": "1.0"}
    paths = [wheel(tmp_path, "dask", "2026.8.0", "click>=8.1", "PyYAML>=5.3", "numpy; extra == 'array'")]
    paths += [wheel(tmp_path, name, version) for name, version in versions.items()]
    here = {"click": "8.0", "pyyaml": "6.0", "numpy": "2.5.0", "wrapt": "1.17"}
    lacking = wheels.lacking(map(wheels.read_wheel, paths), ["dask>=2025.1", "numpy>=1.26", "wrapt>=2.0"], here)
    # the machine's click and wrapt are too old, its NumPy is the one of its CuPy
    assert sorted(w.name for w in lacking) == ["click", "dask", "wrapt"]
