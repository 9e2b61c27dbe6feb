"""What the kernel lets processes have: memory by cgroups, that of peers, cores and NUMA nodes."""

import ctypes
import errno
import json
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from programs import python
from shared_host import as_neighbour, by_root

from hpcgpu.host import peer_memory
from hpcgpu.host.host_memory import format_exit, memory_left, memory_limit, oom_kills
from hpcgpu.host.peer_memory import Identity, Slots
from hpcgpu.model import CpuSet
from hpcgpu.model.allocation import ALL_OF_THE_NODE

GIB = 1 << 30
CHILD = """
import sys
from hpcgpu.host.peer_memory import Identity, Slots
from hpcgpu.model import CpuSet
from hpcgpu.model.allocation import ALL_OF_THE_NODE
slots = Slots()
slot = slots.take()
slots.write(slot, b"a" * 32)
print(dict(Identity.of_this_process(slot)._asdict()), flush=True)
sys.stdin.read()
"""
VALUES = st.none() | st.booleans() | st.integers(-5, 2**70) | st.text(max_size=4) | st.binary(max_size=40)
FORKS = """
import os, signal, sys, threading
from hpcgpu.host.peer_memory import Slots
slots = Slots()
def use():
    while True:
        slots.free(slots.take())
for _ in range(2):
    threading.Thread(target=use, daemon=True).start()
sys.setswitchinterval(1e-4)
for _ in range(80):
    if not (pid := os.fork()):
        signal.alarm(20)  # ends a child that waits
        slots.free(slots.take())
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
"""
CODE = """
import json, os, sys, threading
from hpcgpu.errors import BindingError
from hpcgpu.host.kernel_binding import bind, read_binding
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


def node(tmp_path: Path, version: int, available_bytes: int = 60 * GIB) -> Path:
    """Return a /proc of a job's process on a node of 64 GiB, whose cgroups are below ``tmp_path``."""
    own = tmp_path / "proc" / "self"
    own.mkdir(parents=True)
    mount = tmp_path / "cgroup"
    (own.parent / "meminfo").write_text(f"MemTotal: {64 * GIB >> 10} kB\nMemAvailable: {available_bytes >> 10} kB\n")
    kind, options, line = ("cgroup2", "rw", "0::") if version == 2 else ("cgroup", "rw,memory", "4:memory:")
    mounts = (f"36 25 0:31 {root} {mount} rw - {kind} {kind} {options}\n" for root in ("/../..", "/"))  # one is hidden
    (own / "mountinfo").write_text("".join(mounts))
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
    assert memory_limit(proc=proc) == (16 * GIB, f"cgroup {tmp_path / 'cgroup' / 'job_7'}")
    assert memory_left(proc=proc) == pytest.approx(6 / 16)


def test_without_limits_it_is_the_nodes_memory(tmp_path: Path, version: int) -> None:
    tmp_path = tmp_path / f"v{version}"
    proc = node(tmp_path, version, available_bytes=16 * GIB)
    assert memory_left(proc=proc) == 0.25
    group(tmp_path, "job_7/step_0", limit="max", used=GIB, files=0)
    assert memory_left(proc=proc) == 0.25
    # files in the page cache are left, those of a tmpfs are not
    group(tmp_path, "job_7/step_0", limit=10 * GIB, used=10 * GIB, files=GIB, tmpfs=4 * GIB)
    assert memory_left(proc=proc) == pytest.approx(0.1)
    assert 0 < memory_left() <= 1


def test_memory_of_gpus_is_no_host_memory(tmp_path: Path, version: int) -> None:
    """4 x GH200 with 120 GB of LPDDR and 96 GB of HBM each, in little: 64 GiB in all, of which the GPUs have 24."""
    proc, numa = node(tmp_path, version, available_bytes=20 * GIB), tmp_path / "node"
    group(tmp_path, "job_7/step_0", limit="max", used=GIB, files=0)
    for number, free in ((1, 10), (9, 6)):
        (numa / f"node{number}").mkdir(parents=True)
        kib = {"MemTotal": 12, "MemFree": free, "MemUsed": 12 - free, "Active(file)": 1, "Inactive(file)": 1}
        text = "".join(f"Node {number} {name}:  {n * GIB >> 10} kB\n" for name, n in kib.items())
        (numa / f"node{number}" / "meminfo").write_text(text)
    assert memory_limit(CpuSet([1, 9]), proc, numa) == (40 * GIB, ALL_OF_THE_NODE)
    assert memory_limit(CpuSet([1]), proc, numa).nbytes == 52 * GIB
    assert memory_left(CpuSet([1, 9]), proc, numa) == 0.0  # what seemed left is the GPUs'
    assert memory_left(CpuSet([9]), proc, numa) == pytest.approx(12 / 52)
    assert memory_left(CpuSet(), proc, numa) == pytest.approx(20 / 64)
    assert memory_limit(CpuSet([7]), proc, numa).nbytes == 64 * GIB  # the driver has taken it away since


def test_exit_by_the_kernel_for_lack_of_memory_says_so(tmp_path: Path, version: int) -> None:
    tmp_path = tmp_path / f"v{version}"
    proc, own = node(tmp_path, version), tmp_path / "cgroup" / "job_7" / "step_0"
    assert oom_kills(proc) == 0
    group(tmp_path, "job_7/step_0", limit=2 * GIB, used=GIB, files=0)
    for name in ("memory.events", "memory.oom_control"):
        (own / name).write_text("oom_kill_disable 0\noom 7\noom_kill 3\n")
    assert format_exit(-9, 1, proc).startswith(
        f"was killed by signal 9: out of memory (2.0 GiB, cgroup {own}; the kernel has killed 2 here since its start)"
    )
    ends = [format_exit(code, kills, proc) for code, kills in ((-9, 3), (-11, 1), (3, 1))]
    assert ends == ["was killed by signal 9", "was killed by signal 11", "exited with status 3"]


def test_identity_of_a_child_is_proved_and_of_a_dead_one_not() -> None:
    with subprocess.Popen([sys.executable, "-c", CHILD], stdin=-1, stdout=-1, text=True) as child:
        peer = Identity.parse(eval(child.stdout.readline()))
        assert peer
        assert peer.refusal(answer := b"a" * 32) == ""
        assert peer.refusal(bytes(32)) == peer_memory.ENDED  # another process has its pid
        assert peer._replace(host="elsewhere").refusal(answer) == "another host, or another pid namespace"
        assert peer._replace(slot=4096).refusal(answer) == "process_vm_readv: Bad address"
        child.communicate("")
    assert peer.refusal(answer) == peer_memory.ENDED


@by_root
def test_memory_of_another_user_is_refused_with_the_reason() -> None:
    peer = Identity.of_this_process(Slots().take())

    def look() -> None:
        assert peer.refusal(b"") == "process_vm_readv: Operation not permitted (another user, or a container's rules)"

    as_neighbour(look)


@given(st.none() | VALUES | st.dictionaries(st.sampled_from([*Identity._fields, "x"]), VALUES))
def test_parse_takes_an_identity_or_gives_none(value: object) -> None:
    peer = Identity.parse(value)
    assert peer is None or (peer.pid > 0 and len(peer.challenge) == 32 and isinstance(peer.refusal(b""), str))


def test_copy_fails_for_bytes_that_were_given_up() -> None:
    slots, lent, out = Slots(2), ctypes.create_string_buffer(b"bytes"), bytearray(5)
    spans = [(ctypes.addressof(lent), memoryview(out))]
    first, second = slots.take(), slots.take()
    assert 0 not in (first, second)
    assert slots.take() == 0
    peer, answer = Identity.of_this_process(first), b"a" * 32
    slots.write(first, answer)
    peer.copy(spans, answer)
    assert out == b"bytes"
    slots.free(first)
    with pytest.raises(OSError, match="given up") as caught:
        peer.copy(spans, answer)
    assert caught.value.errno == errno.ESTALE
    assert slots.take() == first


def test_slots_are_taken_in_a_child_forked_at_any_time() -> None:
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", FORKS], timeout=300).returncode == 0


@pytest.mark.parametrize(("most", "count"), [(1 << 30, 3000), (7, 50)])
def test_many_spans_are_copied_by_few_calls(monkeypatch: pytest.MonkeyPatch, most: int, count: int) -> None:
    monkeypatch.setattr(peer_memory, "_MOST_BYTES", most)
    source = bytes(range(256)) * count
    kept = ctypes.create_string_buffer(source, len(source))
    address = ctypes.addressof(kept)
    outs = [memoryview(bytearray(i % 20)) for i in range(count)]
    places = [i * 7 % (len(source) - 20) for i in range(count)]
    peer_memory.read(os.getpid(), [(address + place, out) for place, out in zip(places, outs, strict=True)])
    assert all(out == source[at : at + out.nbytes] for at, out in zip(places, outs, strict=True))


def test_pages_that_the_kernel_does_not_copy_are_known(tmp_path: Path) -> None:
    path = tmp_path / "cut off"
    path.write_bytes(bytes(3 * mmap.PAGESIZE))
    with path.open("r+b") as f, mmap.mmap(f.fileno(), 0) as memory:
        pages = ctypes.c_char.from_buffer(memory)
        address = ctypes.addressof(pages)
        whole, first = (address, len(memory)), (address, mmap.PAGESIZE)
        assert peer_memory.are_readable([first, whole] * 700)
        f.truncate(mmap.PAGESIZE)
        assert not peer_memory.are_readable([*[first] * 700, whole])
        assert peer_memory.are_readable([first])
        del pages


def bound(policy: str, nodes: str, cpus: str = str(FIRST)) -> dict[str, object]:
    found: dict[str, object] = json.loads(python(CODE, policy, nodes, cpus, check=True).stdout)
    return found


@pytest.mark.parametrize("policy", ["preferred-many", "bind", "interleave", "none"])
def test_policy_and_mask_are_those_of_all_threads_and_children(policy: str) -> None:
    nodes = "" if policy == "none" else "0"  # none: the kernel's
    found = bound(policy, nodes)
    assert found["masks"] == found["child_masks"] == [str(FIRST)]
    assert found["threads"] == 2
    assert found["own"] == found["child"] == [policy, nodes]


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
