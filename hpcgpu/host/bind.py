"""Bind this process to its cores and memory nodes, and read back the binding of a process."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import re
from pathlib import Path

from hpcgpu.errors import BindingError
from hpcgpu.model import ActualBinding, Binding, CpuSet

# System call numbers of (set_mempolicy, get_mempolicy): libnuma is not on every node, and is not needed.
_CALLS = {"x86_64": (238, 239), "aarch64": (237, 236), "ppc64le": (261, 260)}
_POLICIES = ("none", "preferred", "bind", "interleave", "local", "preferred-many")
_IN_NUMA_MAPS = {"default": "none", "prefer": "preferred", "prefer (many)": "preferred-many"}
_NUMA_MAPS = re.compile(r"[0-9a-f]+ (prefer \(many\)|[a-z]+)(?:=\S+?)?(?::([0-9,-]+))?(?: |$)")
_ALLOWED = re.compile(r"^Cpus_allowed_list:\s*(\S+)", re.M)
_NODE_BITS = 1024  # the kernel's largest MAX_NUMNODES (CONFIG_NODES_SHIFT=10)
_WORD_BITS = 64


def bind(binding: Binding) -> None:
    """Bind the calling thread to cores and memory nodes; raise BindingError if the kernel allows none of the cores."""
    # BindingError also if it refuses the mask or the nodes. Call it before the process has other threads, imports numpy
    # or starts CUDA: later threads and children inherit the binding. Cores outside the process's mask are left out.
    # Where the kernel forbids memory policies (containers without CAP_SYS_NICE) the old policy stays;
    # :func:`read_binding` shows it.
    now = CpuSet(os.sched_getaffinity(0))
    target = binding.cpuset & now
    if not target:
        raise BindingError(
            f"planned for PUs {str(binding.cpuset) or '(none)'}, but this process may run on {now} only: "
            "plan with the mask of the process that starts the workers"
        )
    try:
        os.sched_setaffinity(0, target)
    except OSError as e:
        raise BindingError(f"the kernel refuses to bind to PUs {target}: {e.strerror}") from e
    if binding.memory_policy != "none":
        _set_memory_policy(binding)


def bind_all_threads(binding: Binding) -> None:
    """Bind the calling thread as :func:`bind` does, and give the process's other threads the same cores."""
    # For a process that others started: the memory policy of threads that MPI and numpy have made stays as it is.
    bind(binding)
    mask = os.sched_getaffinity(0)
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.sched_setaffinity(int(task.name), mask)


def _set_memory_policy(binding: Binding) -> None:
    if binding.memory_policy not in _POLICIES:
        raise BindingError(f"{binding.memory_policy!r} is no memory policy; allowed: {', '.join(_POLICIES)}")
    error = _set_mempolicy(binding.memory_policy, binding.memory_nodes)
    if error == errno.EINVAL and binding.memory_policy == "preferred-many":
        # Linux before 5.15 supports only one preferred node: the GPU's own.
        home = binding.gpus[0].numa_node if binding.gpus else None
        node = home if home is not None and home in binding.memory_nodes else min(binding.memory_nodes)
        error = _set_mempolicy("preferred", CpuSet([node]))
    if error and error not in (errno.EPERM, errno.ENOSYS):
        raise BindingError(
            f"the kernel refuses memory policy {binding.memory_policy} on NUMA nodes {binding.memory_nodes}: "
            f"{os.strerror(error)}; does this process's cgroup allow these nodes (Mems_allowed_list)?"
        )


def _set_mempolicy(policy: str, nodes: CpuSet) -> int:
    """Set the thread's memory policy; return 0 or the errno."""
    numbers = _CALLS.get(platform.machine())
    if numbers is None:
        return errno.ENOSYS
    mask = (ctypes.c_ulong * (_NODE_BITS // _WORD_BITS))()
    for node in nodes:
        mask[node // _WORD_BITS] |= 1 << node % _WORD_BITS
    libc = ctypes.CDLL(None, use_errno=True)
    # The kernel reads one bit less than maxnode.
    result = libc.syscall(
        ctypes.c_long(numbers[0]), ctypes.c_long(_POLICIES.index(policy)), mask, ctypes.c_ulong(_NODE_BITS + 1)
    )
    return ctypes.get_errno() if result else 0


def read_binding(pid: int | None = None) -> ActualBinding:
    """Return the cores of a process's threads, and its memory policy ("": hidden); BindingError if it has ended."""
    me = pid is None or pid == os.getpid()
    folder = Path("/proc") / str(os.getpid() if pid is None else pid)
    threads = []
    try:
        for task in (folder / "task").iterdir():
            try:
                match = _ALLOWED.search((task / "status").read_text())
            except (FileNotFoundError, ProcessLookupError):  # a thread that has just ended
                continue
            if match:
                threads.append((int(task.name), CpuSet.parse(match[1])))
    except (FileNotFoundError, ProcessLookupError) as e:
        raise BindingError(f"process {pid} does not run any more, so its binding cannot be read") from e
    policy, nodes = _current_policy() if me else _policy_of(folder)
    return ActualBinding(tuple(sorted(threads)), policy, nodes)


def _current_policy() -> tuple[str, CpuSet]:
    numbers = _CALLS.get(platform.machine())
    mode, mask = ctypes.c_int(), (ctypes.c_ulong * (_NODE_BITS // _WORD_BITS))()
    libc = ctypes.CDLL(None, use_errno=True)
    if numbers is None or libc.syscall(
        ctypes.c_long(numbers[1]), ctypes.byref(mode), mask, ctypes.c_ulong(_NODE_BITS + 1), None, ctypes.c_ulong(0)
    ):
        return "", CpuSet()
    bits = (i * _WORD_BITS + b for i, word in enumerate(mask) for b in range(_WORD_BITS) if word >> b & 1)
    name = _POLICIES[mode.value & 0xFF] if mode.value & 0xFF < len(_POLICIES) else ""
    return name, CpuSet(bits)


def _policy_of(folder: Path) -> tuple[str, CpuSet]:
    """Return a process's policy from numa_maps, whose first mapping has no policy of its own."""
    try:
        with (folder / "numa_maps").open() as lines:
            match = _NUMA_MAPS.match(lines.readline())
    except OSError:  # a kernel without NUMA, or another user's process
        return "", CpuSet()
    if not match:
        return "", CpuSet()
    return _IN_NUMA_MAPS.get(match[1], match[1]), CpuSet.parse(match[2] or "")
