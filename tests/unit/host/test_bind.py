"""Binding a real process: mask and memory policy as the kernel has them, for every thread."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest
from waiting import scaled

CODE = """
import json, os, sys, threading
from hpcgpu.errors import BindingError
from hpcgpu.host.process import bind, read_binding
from hpcgpu.model import Binding, CpuSet, Gpu

policy, nodes, cpus = sys.argv[1], CpuSet.parse(sys.argv[2]), CpuSet.parse(sys.argv[3])
try:
    bind(Binding(cpus, (Gpu("0000:01:00.0", numa_node=0),), memory_policy=policy, memory_nodes=nodes))
except BindingError as e:
    print(json.dumps({"error": str(e)}))
    sys.exit()
end = threading.Event()
threading.Thread(target=end.wait).start()  # made after binding
reader, writer = os.pipe()
if os.fork() == 0:
    its = read_binding()
    its = [its.memory_policy, str(its.memory_nodes)], [str(m) for _, m in its.threads]
    os.write(writer, json.dumps(its).encode())
    os._exit(0)
mine, other = read_binding(), json.loads(os.read(reader, 4096))
os.wait()
end.set()
print(json.dumps({
    "masks": sorted({str(m) for _, m in mine.threads}), "threads": len(mine.threads),
    "own": [mine.memory_policy, str(mine.memory_nodes)], "child": other[0],
    "child_masks": other[1],
}))
"""
FIRST = min(os.sched_getaffinity(0))


def bound(policy: str, nodes: str, cpus: str = str(FIRST)) -> dict[str, object]:
    argv = [sys.executable, "-c", textwrap.dedent(CODE), policy, nodes, cpus]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=scaled(60))
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("policy", ["preferred-many", "bind", "interleave"])
def test_policy_and_mask_are_those_of_all_threads_and_children(policy: str) -> None:
    found = bound(policy, "0")
    assert found["masks"] == found["child_masks"] == [str(FIRST)]
    assert found["threads"] == 2
    assert found["own"] == found["child"] == [policy, "0"]


def test_no_policy_is_the_kernels() -> None:
    assert bound("none", "")["own"] == ["none", ""]


def test_a_mask_is_never_widened() -> None:
    found = bound("none", "", f"{FIRST},4096")
    assert found["masks"] == [str(FIRST)]
    assert "may run on" in str(bound("none", "", "4096")["error"])


@pytest.mark.parametrize("policy", ["preferred-many", "bind"])
def test_a_numa_node_that_is_not_there_is_said(policy: str) -> None:
    """``preferred-many`` falls back to ``preferred``, as on Linux before 5.15, which refuses the node too."""
    error = str(bound(policy, "1000")["error"])
    assert f"memory policy {policy} on NUMA nodes 1000" in error
    assert "Mems_allowed_list" in error
    assert "is no memory policy" in str(bound("near", "0")["error"])
