"""What the kernel lets this process have of host memory, by its own cgroup and those above it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcgpu.host.host_memory import memory_left, memory_limit

GIB = 1 << 30


def node(tmp_path: Path, version: int, available_bytes: int = 60 * GIB) -> Path:
    """Return a /proc of a job's process on a node of 64 GiB, whose cgroups are below ``tmp_path``."""
    own = tmp_path / "proc" / "self"
    own.mkdir(parents=True)
    mount = tmp_path / "cgroup"
    (own.parent / "meminfo").write_text(f"MemTotal: {64 * GIB >> 10} kB\nMemAvailable: {available_bytes >> 10} kB\n")
    kind, options, line = ("cgroup2", "rw", "0::") if version == 2 else ("cgroup", "rw,memory", "4:memory:")
    (own / "mountinfo").write_text(f"36 25 0:31 / {mount} rw - {kind} {kind} {options}\n")
    (own / "cgroup").write_text(f"{line}/job_7/step_0\n")
    return own.parent


def group(tmp_path: Path, path: str, limit: int | str, used: int, files: int, tmpfs: int = 0) -> None:
    """Write what a cgroup of each version says; ``files`` are pages of files in ``used``."""
    folder = tmp_path / "cgroup" / path
    folder.mkdir(parents=True, exist_ok=True)
    stat = f"file {files + tmpfs}\nshmem {tmpfs}\nactive_file {files // 4}\ninactive_file {files - files // 4}\n"
    total = "".join(f"total_{line}\n" for line in stat.splitlines())
    small = "active_file 4096\ninactive_file 4096\n"  # of the cgroup without those below it
    for name, text in {
        "memory.max": limit,
        "memory.current": used,
        "memory.limit_in_bytes": (1 << 63) - 4096 if limit == "max" else limit,
        "memory.usage_in_bytes": used,
        "memory.stat": stat if "2" in tmp_path.name else small + total,
    }.items():
        (folder / name).write_text(f"{text}\n")


@pytest.fixture(params=[1, 2], ids=["version 1", "version 2"])
def version(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def test_the_cgroup_that_has_the_least_left_counts(tmp_path: Path, version: int) -> None:
    tmp_path = tmp_path / f"v{version}"
    proc = node(tmp_path, version)
    group(tmp_path, "job_7", limit=16 * GIB, used=14 * GIB, files=4 * GIB)
    group(tmp_path, "job_7/step_0", limit="max", used=9 * GIB, files=GIB)
    assert memory_limit(proc) == (16 * GIB, f"cgroup {tmp_path / 'cgroup' / 'job_7'}")
    assert memory_left(proc) == pytest.approx(6 / 16)


def test_without_limits_it_is_the_nodes_memory(tmp_path: Path, version: int) -> None:
    tmp_path = tmp_path / f"v{version}"
    proc = node(tmp_path, version, available_bytes=16 * GIB)
    assert memory_left(proc) == 0.25
    group(tmp_path, "job_7/step_0", limit="max", used=GIB, files=0)
    assert memory_left(proc) == 0.25
    # files in the page cache are left, those of a tmpfs are not
    group(tmp_path, "job_7/step_0", limit=10 * GIB, used=10 * GIB, files=GIB, tmpfs=4 * GIB)
    assert memory_left(proc) == pytest.approx(0.1)
    assert 0 < memory_left() <= 1
