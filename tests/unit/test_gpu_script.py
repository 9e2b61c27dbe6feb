"""``scripts/gpu.py``: each part has its time, one that fails ends no other, and the report tells of all."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import ModuleType

import psutil
import pytest
from paths import ROOT
from waiting import scaled, until


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


def test_a_part_that_fails_ends_no_other_and_all_is_told(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "ASK", {"here": "print('1.0, a GPU')", "cupy": "import no_such_library"})
    code = "import sys; print('what it said'); sys.exit('it went wrong')"
    pid = tmp_path / "pid"
    stays = "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); print('begun', flush=True); "
    stays += f"open({str(pid)!r}, 'w').write(str(p.pid)); p.wait()"

    class Popen(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            if timeout == 1.0:  # the time of the part that stays is up when it has begun
                until(lambda: pid.exists() and pid.read_text(), "the part has begun", limit_s=30)
                raise subprocess.TimeoutExpired("python", timeout)
            return super().wait(timeout)

    monkeypatch.setattr(gpu.subprocess, "Popen", Popen)
    parts = [
        gpu.Part("wrong", ("-c", code), 20),
        gpu.Part("long", ("-c", stays), 1.0),
        gpu.Part("right", ("-c", f"print('words'); print('''{FIGURE}'''); print('{NO_FIGURE[:5]}')"), 20, "here"),
        gpu.Part("without", ("-c", "raise AssertionError"), 20, "cupy"),
        gpu.Part("empty", ("-c", f"print('''{NO_FIGURE}''')"), 20),
    ]
    assert gpu.run(tmp_path / "out", parts, dict(os.environ), time.monotonic()) == 1
    report = json.loads((tmp_path / "out/gpu.json").read_text())
    assert [(p["name"], p["outcome"], p["exit_code"]) for p in report["parts"]] == [
        ("wrong", "failed", 1),
        ("long", "out of time", None),
        ("right", "done", 0),
        ("without", "not done", None),
        ("empty", "not done", 0),
    ]
    wrong, long, right, without, empty = report["parts"]
    assert wrong["why"] == "exit code 1: it went wrong"
    assert wrong["tail"] == "what it said\nit went wrong\n"
    assert long["why"].endswith("begun")
    assert right["figures"] == [json.loads(FIGURE)]
    assert without["why"] == "cupy: ModuleNotFoundError: No module named 'no_such_library'"
    assert empty["why"] == "not measured: no GPU"
    assert report["libraries"]["here"] == {"is": "1.0, a GPU"}
    page = (tmp_path / "out/gpu.md").read_text()
    assert "| b | c \\| d | m | us | 1.5 | s | 3 |" in page
    assert "## wrong" in page
    assert "## right" not in page
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["gpu.json", "gpu.log", "gpu.md", "machine.txt"]
    log = (tmp_path / "out/gpu.log").read_text()
    assert "what it said\nit went wrong\n\n===== exit code 1," in log
    assert "begun\n\n===== exit code None," in log
    assert "locked memory" in (tmp_path / "out/machine.txt").read_text()
    assert len([line for line in capsys.readouterr().out.splitlines() if line.split()[0] in page]) >= 5
    until(lambda: not lives(int(pid.read_text())), "the child of a part whose time was up has ended", limit_s=10)


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_when_the_time_of_all_is_up_the_rest_is_not_begun(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "ASK", {})
    began = time.monotonic() - gpu.TOTAL_S
    assert gpu.run(tmp_path, [gpu.Part("late", ("-c", "raise AssertionError"), 20)], {}, began) == 1
    (part,) = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert (part["outcome"], part["wall_s"]) == ("out of time", 0)


@pytest.mark.parametrize(("outcome", "source", "code"), [("done", "", 0), ("not done", f"print('''{NO_FIGURE}''')", 3)])
def test_the_exit_code(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outcome: str, source: str, code: int
) -> None:
    monkeypatch.setattr(gpu, "ASK", {})
    assert gpu.run(tmp_path, [gpu.Part("one", ("-c", source), 20)], {}, time.monotonic()) == code
    assert json.loads((tmp_path / "gpu.json").read_text())["parts"][0]["outcome"] == outcome


def test_all_ends_within_nine_minutes_the_most_valuable_first(gpu: ModuleType) -> None:
    assert gpu.TOTAL_S + 2 * gpu.ENDING_S <= 540
    for part in gpu.PARTS:  # what is named is there
        assert [word for word in part.arguments if "/" in word and not (ROOT / word).exists()] == []
        assert part.limit_s <= 90
    files = [p.name for p in gpu.PARTS if p.name.startswith("tests/")]
    assert {ROOT / name for name in files} == set((ROOT / "tests/gpu").rglob("test_*.py"))
    assert [p.name for p in gpu.PARTS[: len(files)]] == files
    assert files[0].endswith("test_spill_gpu.py")
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks/gpu_first_hour.py", "nothing"],
        capture_output=True,
        text=True,
        timeout=scaled(60),
    )
    assert done.returncode == 1
    there = set(done.stderr.strip().partition("there are ")[2].split(", "))
    assert there == {*gpu.FIRST_HOUR, "memcheck"}


@pytest.mark.parametrize("name", ["order", "memcheck"])
def test_a_measurement_without_a_gpu_says_what_is_missing(name: str) -> None:
    argv = [sys.executable, ROOT / "benchmarks/gpu_first_hour.py", name]
    done = subprocess.run(
        argv, capture_output=True, text=True, timeout=scaled(60), env={**os.environ, "LD_LIBRARY_PATH": ""}
    )
    figures = [json.loads(line) for line in done.stdout.splitlines()]
    if any(figure["value"] is not None for figure in figures):
        pytest.skip("a GPU is here")
    assert [(figure["case"], figure["why"].partition(":")[0]) for figure in figures] == [(name, "not measured")]
    assert done.returncode == 0


def test_the_report_goes_where_out_says(tmp_path: Path) -> None:
    source = "import sys; sys.path.insert(0, 'scripts'); import gpu; print(gpu.OUT)"
    argv = [sys.executable, "-c", source]
    for env, where in [({"OUT": str(tmp_path)}, tmp_path), ({"OUT": ""}, ROOT / "build/gpu")]:
        done = subprocess.run(
            argv, capture_output=True, text=True, cwd=ROOT, env={**os.environ, **env}, timeout=scaled(60)
        )
        assert (done.stdout.strip(), done.stderr) == (str(where), "")


def test_the_tests_of_a_gpu_are_counted_with_the_reasons_of_those_that_were_skipped(gpu: ModuleType) -> None:
    xml = """<testsuites><testsuite><testcase name="a"/><testcase name="b"><failure message="x"/></testcase>
    <testcase name="c"><error message="y"/></testcase><testcase name="d"><skipped message="no CuPy here"/></testcase>
    <testcase name="e"><skipped message="no CuPy here"/></testcase></testsuite></testsuites>"""
    tests = gpu.read_tests(xml)
    assert str(tests) == "1 passed; 2 failed: b, c; 2 skipped: no CuPy here"
    for passed, failed, code, outcome in [(3, (), 0, "done"), (0, (), 0, "not done"), (3, ("b",), 1, "failed")]:
        result = gpu.Result("tests", "pytest", 10, exit_code=code, tail="words")
        gpu.judge(result, gpu.Tests(passed, failed, {"no GPU": 2}))
        assert result.outcome == outcome
        assert "2 skipped: no GPU" in result.why


def wheel(folder: Path, name: str, version: str, *requires: str) -> Path:
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        said = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {r}" for r in requires)]
        archive.writestr(f"{name}-{version}.dist-info/METADATA", "\n".join(said) + "\n\n")
    return path


def test_only_wheels_that_are_lacking_are_unpacked(wheels: ModuleType, tmp_path: Path) -> None:
    carried = [
        wheels.read_wheel(path)
        for path in (
            wheel(tmp_path, "dask", "2026.8.0", "click>=8.1", "PyYAML>=5.3", "numpy; extra == 'array'"),
            wheel(tmp_path, "click", "8.5.1"),
            wheel(tmp_path, "pyyaml", "6.0.3"),
            wheel(tmp_path, "numpy", "2.4.6"),
            wheel(tmp_path, "wrapt", "2.5.2"),
            wheel(tmp_path, "unasked", "1.0"),
        )
    ]
    there = {"click": "8.0", "pyyaml": "6.0", "numpy": "2.5.0", "wrapt": "1.17"}
    lacking = wheels.lacking(carried, ["dask>=2025.1", "numpy>=1.26", "wrapt>=2.0", "nowhere"], there)
    # the machine's click and wrapt are too old, its NumPy is the one of its CuPy
    assert sorted(w.name for w in lacking) == ["click", "dask", "wrapt"]


def test_wheels_for_another_python_are_said_to_be(
    wheels: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel(tmp_path, "no-such-package", "1.0")
    (tmp_path / "named").write_text("no-such-package")
    monkeypatch.setattr(wheels.subprocess, "run", lambda argv, **_: subprocess.CompletedProcess(argv, 1))
    with pytest.raises(SystemExit, match=r"this is Python 3\.\d+\. For it: scripts/gpu\.sh wheels --python 3\.\d+$"):
        wheels.unpack(tmp_path, tmp_path / "site")


def test_wheels_that_are_too_big_to_carry_are_named(
    wheels: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def pip(argv: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        asked.extend(argv)
        for name in ("numpy-2.whl", "rmm-26.whl"):
            (Path(argv[argv.index("-d") + 1]) / name).write_bytes(b"x" * 1000)
        return subprocess.CompletedProcess(argv, 0)

    monkeypatch.setattr(wheels.subprocess, "run", pip)
    assert wheels.fetch(tmp_path / "wheels", "3.12", ["cuda-core"], 10_000) == 0
    assert {"--python-version=3.12", "cuda-core", "--only-binary=:all:"} <= set(asked)
    assert [word for word in asked if word.startswith("distributed")]
    # the machine's NumPy is the one of its CuPy
    assert [p.name for p in (tmp_path / "wheels").glob("*.whl")] == ["rmm-26.whl"]
    assert wheels.fetch(tmp_path / "wheels", "3.12", ["numpy"], 10_000) == 0
    assert len(list((tmp_path / "wheels").glob("*.whl"))) == 2
    assert wheels.fetch(tmp_path / "wheels", "3.12", [], 999) == 1
    assert "the biggest: rmm-26.whl" in capsys.readouterr().err
