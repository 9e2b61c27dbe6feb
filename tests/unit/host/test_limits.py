"""The limits of this process: what the kernel says, and what cgroups allow."""

import os
import resource
from pathlib import Path

import pytest

from hpcgpu.host import limits


def proc_of(folder: Path, version: int) -> Path:
    """Return a /proc of a process in a cgroup of a job that may have 500 processes, its step 900."""
    proc, mount = folder / "proc", folder / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "sys/net/ipv4").mkdir(parents=True)
    (proc / "sys/net/ipv4/ip_local_port_range").write_text("32768\t60999\n")
    kind, options, line = ("cgroup2", "rw", "0::") if version == 2 else ("cgroup", "rw,pids", "8:pids:")
    (proc / "self/mountinfo").write_text(f"36 25 0:31 / {mount} rw - {kind} {kind} {options}\n")
    (proc / "self/cgroup").write_text(f"{line}/job/step\n")
    for path, text in {".": "max", "job": "500", "job/step": "900"}.items():
        (mount / path).mkdir(exist_ok=True, parents=True)
        (mount / path / "pids.max").write_text(f"{text}\n")
    return proc


@pytest.mark.parametrize("version", [1, 2])
def test_limits_of_a_job_are_the_least_of_its_cgroups(tmp_path: Path, version: int) -> None:
    read = limits.read(proc_of(tmp_path, version))
    assert (read.job_processes, read.ports) == (500, 28232)


def test_limits_of_this_process_are_the_kernels(tmp_path: Path) -> None:
    read = limits.read()
    assert read.files == resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert (read.processes == -1) == (os.geteuid() == 0 or resource.getrlimit(resource.RLIMIT_NPROC)[0] == -1)
    unknown = limits.read(tmp_path)  # no /proc
    assert (unknown.job_processes, unknown.ports) == (-1, -1)
