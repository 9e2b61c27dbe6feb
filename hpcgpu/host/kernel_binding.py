"""Bind this process to cores and memory nodes, and read from the kernel what it is bound to."""

from __future__ import annotations

import ctypes
import errno
import os

from hpcgpu.errors import BindingError
from hpcgpu.light_typing import TYPE_CHECKING
from hpcgpu.model.allocation import CpuSet

if TYPE_CHECKING:
    from pathlib import Path

    from hpcgpu.model import ActualBinding, Binding

# System call numbers of (set_mempolicy, get_mempolicy): libnuma is not on every node, and is not needed.
_CALLS = {"x86_64": (238, 239), "aarch64": (237, 236), "ppc64le": (261, 260)}
_POLICIES = ("none", "preferred", "bind", "interleave", "local", "preferred-many")
_NODE_BITS = 1024  # the kernel's largest MAX_NUMNODES (CONFIG_NODES_SHIFT=10)
_WORD_BITS = 64


def bind(binding: Binding) -> None:
    """Bind the calling thread to cores and memory nodes; raise BindingError if the kernel allows none of the cores.

    BindingError also if it refuses the mask or the nodes. Call it before the process has other threads, imports numpy
    or starts CUDA: later threads and children inherit the binding. Cores outside the process's mask are left out. Where
    the kernel forbids memory policies (containers without CAP_SYS_NICE) the old policy stays; :func:`read_binding`
    shows it.
    """
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
    """Bind the calling thread as :func:`bind` does, and give the process's other threads the same cores.

    For a process that others started: the memory policy of threads that MPI and numpy have made stays as it is.
    """
    bind(binding)
    mask = os.sched_getaffinity(0)
    for task in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(task), mask)
        except ProcessLookupError:  # it has just ended
            pass


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
    numbers = _CALLS.get(os.uname().machine)
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


def read_binding() -> ActualBinding:
    """Return the cores of this process's threads, and its memory policy ("": the kernel hides it)."""
    from hpcgpu.model import ActualBinding

    threads = []
    for task in os.listdir("/proc/self/task"):
        if cpus := _allowed("Cpus", f"/proc/self/task/{task}"):  # else the thread has just ended
            threads.append((int(task), cpus))
    return ActualBinding(tuple(sorted(threads)), *_current_policy())


def text_of(path: str | Path) -> str:
    """Return the text of a kernel file; "" if it cannot be read."""
    try:
        with open(path) as file:
            return file.read()
    except OSError:  # absent, or the speed of an interface that is down (EINVAL)
        return ""


def granted_memory_nodes(proc: str | Path = "/proc") -> CpuSet:
    """Return the NUMA nodes that this process may take memory from; empty if the kernel does not show them."""
    return _allowed("Mems", f"{proc}/self")


def _allowed(kind: str, folder: str) -> CpuSet:
    """Return the ``Cpus`` or ``Mems`` that the status in this folder of /proc lists; empty if it lists none."""
    return CpuSet.parse(text_of(f"{folder}/status").partition(f"\n{kind}_allowed_list:")[2].partition("\n")[0])


def _current_policy() -> tuple[str, CpuSet]:
    numbers = _CALLS.get(os.uname().machine)
    mode, mask = ctypes.c_int(), (ctypes.c_ulong * (_NODE_BITS // _WORD_BITS))()
    libc = ctypes.CDLL(None, use_errno=True)
    if numbers is None or libc.syscall(
        ctypes.c_long(numbers[1]), ctypes.byref(mode), mask, ctypes.c_ulong(_NODE_BITS + 1), None, ctypes.c_ulong(0)
    ):
        return "", CpuSet()
    bits = (i * _WORD_BITS + b for i, word in enumerate(mask) for b in range(_WORD_BITS) if word >> b & 1)
    name = _POLICIES[mode.value & 0xFF] if mode.value & 0xFF < len(_POLICIES) else ""
    return name, CpuSet(bits)
