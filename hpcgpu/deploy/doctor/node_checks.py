"""Gather the facts of a node of the doctor's job."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hpcgpu.deploy.doctor import login
from hpcgpu.host import cgroup, discover, gpus, nvml, probes, process
from hpcgpu.host import run as programs
from hpcgpu.model import Command, Gpu, Settings, Topology
from hpcgpu.plan.doctor.facts import GpuSpeed, Limits, NodeFacts, Ucx
from hpcgpu.spill.storage.scratch import home_of

_PROBES_S = 25.0  # for all probes of a node together: imports and CUDA on a cold file system
_WRITE_BYTES = 64 << 20


def gather_facts(settings: Settings) -> NodeFacts:
    """Gather this node's facts."""
    checks: dict[str, Callable[[], Any]] = {
        "scratch": lambda: login.folder(home_of(settings.local_directory), _WRITE_BYTES),
        "ucx": lambda: Ucx(**probes.ucx()),
        "topology": discover.topology,
        "speed": _speed,
        "imports": probes.imports,
    }
    results, unknown = probes.gather(checks, _PROBES_S)
    topology: Topology | None = results.pop("topology", None)
    imports = results.pop("imports", {})
    cpus, cores = probes.cpus()
    facts = nvml.read()
    return NodeFacts(
        host=os.uname().nodename,
        python=replace(login.python(), **imports),
        limits=Limits(**probes.limits()),
        cpus=cpus,
        cores=cores,
        memory_bytes=cgroup.memory_limit().nbytes,
        temporary=tempfile.gettempdir(),
        gpus=tuple(gpu.model for gpu in facts.gpus),
        compute_modes=tuple(gpu.compute_mode for gpu in facts.gpus),
        driver=nvml.driver(),
        no_driver=facts.trouble,
        # of Slurm only, which sets no variable for none; None for PBS, which has no variable
        granted_gpus=int(os.environ.get("SLURM_GPUS_ON_NODE") or 0) if "SLURM_JOB_ID" in os.environ else None,
        nics=topology.nics if topology else None,
        hops=topology.hops if topology else (),
        unknown={**unknown, "nics": unknown.get("topology", "")},
        **results,
    )


def _speed() -> GpuSpeed:
    """Measure the first GPU, as CUDA counts by PCI address, in a process; raise RuntimeError if that fails."""
    topology = discover.topology()
    visible = gpus.visible(topology.gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))
    if not visible:
        raise RuntimeError("no GPU here")
    argv = process.python_argv("hpcgpu.deploy.doctor.gpu_speed", *_near_and_far(topology, visible[0]))
    done = programs.run_sync(Command(argv, env={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, timeout_s=_PROBES_S - 5))
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip() or f"it ended with {done.returncode}")
    return GpuSpeed(name=visible[0].model, **json.loads(done.stdout))


def _near_and_far(topology: Topology, gpu: Gpu) -> tuple[str, ...]:
    """Return the GPU's NUMA node, and another one, if possible of another package."""
    if gpu.numa_node is None:
        return ()
    granted = cgroup.granted_memory_nodes()
    nodes = [node for node in topology.numa_nodes if not granted or node.os_index in granted]
    near = next((node for node in nodes if node.os_index == gpu.numa_node), None)
    if near is None:
        return ()
    others = sorted((n for n in nodes if n is not near), key=lambda n: n.package == near.package)
    return tuple(str(node.os_index) for node in (near, *others[:1]))
