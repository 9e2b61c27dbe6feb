"""A rank and its node: the granted resources, the plan of its workers, and the wait of other ranks for their leader.

Ranks that wait start nothing, and end with their leader.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from hpcgpu.errors import LaunchError
from hpcgpu.host import log, process
from hpcgpu.launch import read_allocation
from hpcgpu.model import CpuSet

if TYPE_CHECKING:
    from hpcgpu.model import Gpu, Layout, RunDocument, Settings, Topology, WorkerSpec
    from hpcgpu.model.allocation import BootstrapSettings
    from hpcgpu.plan import RankRecord


_NAME_BYTES = 107  # of sockaddr_un, without the last NUL (unix(7))


@contextlib.contextmanager
def socket_address(path: str) -> Iterator[str]:
    """Yield an address of ``path`` for bind or connect; raise FileNotFoundError if its folder does not exist."""
    if len(os.fsencode(path)) <= _NAME_BYTES:
        yield path
        return
    folder, name = os.path.split(path)
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{name}"
    finally:
        os.close(fd)


_GOODBYE = b"end"
_DISMISS_S = 2.0


class LeaderSocket:
    """The socket to which a node's other ranks connect: a unix socket in a folder of mode 0700."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with socket_address(path) as address:
            self._sock.bind(address)
        self._sock.listen(1024)  # the kernel connects the ranks; the leader accepts them at its end only

    def dismiss(self, count: int, limit_s: float = _DISMISS_S) -> None:
        """Let ``count`` ranks end with exit code 0; ranks that do not come within ``limit_s`` are dead."""
        end_s = time.monotonic() + limit_s
        for _ in range(count):
            self._sock.settimeout(max(0.001, end_s - time.monotonic()))
            try:
                sock, _ = self._sock.accept()
            except TimeoutError:
                return
            with sock, contextlib.suppress(OSError):
                sock.send(_GOODBYE)

    def close(self) -> None:
        """End the connections of ranks that wait."""
        self._sock.close()


def follow(rank: int, path: str) -> int:
    """Wait for the end of the leader at the socket ``path``; return the exit code."""
    with (
        contextlib.suppress(ConnectionError, FileNotFoundError),  # the leader is dead, or its folder is gone
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock,
    ):
        with socket_address(path) as address:
            sock.connect(address)
        if sock.recv(len(_GOODBYE)) == _GOODBYE:
            return 0
    log.say(f"rank {rank}: the leader of this node ended without a goodbye")
    return os.EX_SOFTWARE


Records = Sequence[Mapping[str, Any]]


class NodePlan(NamedTuple):
    """A leader's workers, and messages about the node for people."""

    workers: tuple[WorkerSpec, ...]
    notes: tuple[str, ...]


def granted(bootstrap: BootstrapSettings, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the resources that this rank may use, for its record in the rendezvous."""
    if bootstrap.gpus is not None:
        from hpcgpu.model.allocation import parse_simulated

        count, devices, trouble = parse_simulated(bootstrap.gpus).per_node, "", ""
    else:
        from hpcgpu.host import nvml

        facts, devices = nvml.read(), environ.get("CUDA_VISIBLE_DEVICES", "")
        count, trouble = len(nvml.visible_gpus(facts.gpus, environ.get("CUDA_VISIBLE_DEVICES"))), facts.trouble
    per_node, cpus = bootstrap.gpus_per_node, str(CpuSet(os.sched_getaffinity(0)))
    return {"gpus": min(count, per_node or count), "devices": devices, "cpus": cpus, "trouble": trouble}


def rank_record(record: Mapping[str, Any]) -> RankRecord:
    """Return the part of a record that the layout is planned from."""
    from hpcgpu.plan import RankRecord

    return RankRecord(*(record[name] for name in RankRecord._fields))


def plan(
    run: RunDocument, environ: Mapping[str, str], scratch: str, records: Records, layout: Layout, rank: int
) -> NodePlan:
    """Return the workers of the leader ``rank``; raise LaunchError if GPUs of ``gpus_per_node`` are missing."""
    from hpcgpu.deploy.processes.node import facts_of, folder_notes
    from hpcgpu.host import discover  # psutil takes 30 CPU ms, which every rank would pay
    from hpcgpu.plan.binding.workers import node_warnings, plan_workers

    home, host, settings = layout.node_of(rank), records[rank]["host"], run.settings
    here = [n for n in layout.nodes if records[n.leader]["host"] == host]
    topology = discover.topology()
    gpus = _gpus_of(settings, topology, environ, host)
    masks = {r: CpuSet.parse(records[r]["cpus"]) for r in home.ranks}
    os.sched_setaffinity(0, CpuSet().union(*masks.values()))
    allocation = read_allocation(environ, host)
    extra: dict[str, Any] = {"scratch": scratch, "masks": masks if settings.respect_launcher else {}}
    if run.shape == "member":  # named by their job; without a batch system, and an id from elsewhere, that is a process
        extra |= {"job_id": allocation.job_id or str(os.getpid()), "restart_count": allocation.restart_count}
    part = home.worker_count, sum(n.worker_count for n in here)
    facts = facts_of(host, topology, gpus, environ, run, part, **extra)
    before = [n for n in here if n.node < home.node]
    workers = tuple(spec for _, spec in plan_workers(settings, facts, home, before))
    notes = (*(topology.warnings if settings.gpus is None else ()), *process.replaced(os.environ, settings.env))
    notes += node_warnings(settings, masks, workers)
    if home is here[0]:
        notes += folder_notes(settings, sum(n.worker_count for n in here))
    log.say_of(host, notes)
    return NodePlan(workers, notes)


def _gpus_of(settings: Settings, topology: Topology, environ: Mapping[str, str], host: str) -> tuple[Gpu, ...]:
    """Return the node's GPUs for its workers, simulated or real; raise LaunchError for fewer than ``gpus_per_node``."""
    from hpcgpu.deploy.processes.node import gpus_of
    from hpcgpu.host import nvml
    from hpcgpu.report.machine import format_other_gpus

    gpus = gpus_of(settings, topology, environ, host)
    if settings.gpus_per_node and len(gpus) < settings.gpus_per_node:
        why = "; ".join(filter(None, (format_other_gpus(topology), nvml.read().trouble)))
        raise LaunchError(
            f"{settings.gpus_per_node} GPUs per node were asked for ({settings.where('gpus_per_node')}), "
            f"but {len(gpus)} can be opened on {host}{f' ({why})' if why else ''}"
        )
    return gpus
