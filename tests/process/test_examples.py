"""The examples, run as users run them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import ranks
from paths import ROOT
from waiting import scaled

EXAMPLES = ROOT / "examples"
ENTRY_POINTS = pytest.mark.parametrize("entry_point", ["python", "hpcgpu run"])
COLUMNS = ["process", "managed", "unmanaged", "recent", "spilled", "device", "host", "disk"]
README = (EXAMPLES / "README.md").read_text()


def run(tmp_path: Path, entry_point: str, gpus: str, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable] if entry_point == "python" else [str(ranks.BIN / "hpcgpu"), "run", "--gpus", gpus]
    return subprocess.run(
        [*program, str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
        timeout=scaled(150),
        env=ranks.environment(HOME=str(tmp_path)),
        stdin=subprocess.DEVNULL,
    )


@ENTRY_POINTS
def test_schedulers_agree(tmp_path: Path, entry_point: str) -> None:
    done = run(
        tmp_path, entry_point, "sim:2", "schedulers.py", "--size", "1000000", "--chunk", "100000", "--workers", "2"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    head, *lines, last = done.stdout.splitlines()
    assert "mean of 1,000,000 random numbers in 10 chunks" in head
    found = [re.fullmatch(r"(.+?) +\d+\.\d{3} s   (0\.\d{15})", line) for line in lines]
    assert [m and m[1] for m in found] == ["serial", "threads, 2", "processes, 2", "distributed, 2", "hpcgpu, 2 GPUs"]
    assert all(abs(float(m[2]) - 0.5) < 0.005 for m in found if m)  # 0.005: 17 standard deviations
    assert last == "all means agree"


def table(text: str) -> dict[str, dict[str, int]]:
    """Return the printed rows, by name."""
    head, *lines = text.splitlines()
    assert head.split() == COLUMNS
    found = [re.fullmatch(r"(.+?)((?: +\d+){8})", line) for line in lines]
    return {m[1]: dict(zip(COLUMNS, map(int, m[2].split()), strict=True)) for m in found if m}


@ENTRY_POINTS
def test_memory_types_show_what_happens(tmp_path: Path, entry_point: str) -> None:
    done = run(tmp_path, entry_point, "sim:2x40MiB", "memory_types.py", "--size", "128", "--leak", "64")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the arrays are right" in done.stdout
    rows = table(done.stdout)
    idle, made, read = rows["idle"], rows["4 of 4 parts made"], rows["all of them read"]
    assert [idle[c] for c in ("managed", "spilled", "device", "host", "disk")] == [0, 0, 0, 0, 0]
    assert made["device"] + made["host"] + made["disk"] == 128
    # a part that the other worker has summed is with both until Dask drops one of the two
    assert read["device"] + read["host"] + read["disk"] >= 128
    for row in (made, read):
        assert row["device"] <= 64
        assert row["spilled"] == row["host"] + row["disk"]
    released, leaked, later, freed, trimmed = (
        rows[n] for n in ("arrays released", "something leaked", "  5 s later", "leak freed", "trim_memory")
    )
    assert released["spilled"] == released["device"] == released["host"] == released["managed"] == 0
    # two workers with 64 MiB each, less what the workers need for themselves or give back meanwhile
    assert leaked["process"] - released["process"] > 100
    assert leaked["recent"] > 100
    assert later["unmanaged"] - leaked["unmanaged"] > 100
    assert leaked["recent"] - later["recent"] > 100
    assert later["process"] - freed["process"] > 100
    assert freed["process"] - trimmed["process"] > 30  # what the arrays took in host memory


def test_svd_is_right(tmp_path: Path) -> None:
    done = run(tmp_path, "hpcgpu run", "sim:2x32MiB", "svd.py")
    assert done.returncode == 0, done.stdout + done.stderr
    worst = re.search(r"^100 singular values of 200000 x 100: largest relative difference (.+)$", done.stdout, re.M)
    assert worst
    assert float(worst[1]) < 1e-12
    assert re.search(r"^spilled: device_to_host .+, host_to_device \d.*B$", done.stdout, re.M)


def test_every_example_is_described_and_prints_its_help() -> None:
    for path in EXAMPLES.glob("*.py"):
        assert f"[{path.name}]({path.name})" in README
        done = subprocess.run([sys.executable, str(path), "--help"], capture_output=True, text=True, timeout=scaled(60))
        assert (done.returncode, "--cupy" in done.stdout) == (0, True), done.stderr
