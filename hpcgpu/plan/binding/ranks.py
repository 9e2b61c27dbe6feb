"""The place of one rank of any launcher on its node: that of the worker, or the workers, of its GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpcgpu.errors import BindingError
from hpcgpu.light_typing import NamedTuple
from hpcgpu.model.allocation import BindingRules, CpuSet
from hpcgpu.model.topology import Binding, Gpu, Topology
from hpcgpu.plan.binding.bindings import cuda_env, plan_bindings
from hpcgpu.plan.binding.network import USER_VARIABLES, nccl_env, ucx_env


class RankPlace(NamedTuple):
    """The binding of a rank, with its own GPUs alone, and the variables that go with it."""

    binding: Binding
    env: tuple[tuple[str, str], ...]

    def changes(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the variables to set in an environment: the user's own ports stay."""
        users = {name for name in USER_VARIABLES if name in environ}
        users |= {"UCX_MAX_RNDV_RAILS"} if "UCX_NET_DEVICES" in users else set()
        return {name: value for name, value in self.env if name not in users}


def plan_rank(
    topology: Topology,
    gpus: Sequence[Gpu],
    allowed: CpuSet,
    rank: int,
    ranks: int,
    allowed_nodes: CpuSet | None = None,
    *,
    all_visible: bool = False,
) -> RankPlace:
    """Plan the place of ``rank``, one of the ``ranks`` of its node; BindingError if GPUs and ranks do not match.

    Each rank has one GPU, or equally many ranks share each GPU, or each rank has equally many GPUs. Only a rank's own
    are visible, so that the first is its own whatever the program calls it: a program that takes the GPU of its local
    rank fails, and takes no other rank's. ``all_visible`` is for such programs.
    """
    count = len(gpus)
    if ranks % count and count % ranks:
        right = [n for n in range(1, count + 1) if count % n == 0]
        raise BindingError(
            f"{ranks} ranks on this node do not match {count} GPUs ({', '.join(g.pci for g in gpus)}); start "
            f"{', '.join(map(str, right))} or a multiple of {count}"
        )
    if ranks > count and (single := next((g for g in gpus if g.compute_mode), None)):
        raise BindingError(
            f"{ranks} ranks share {count} GPUs, but the GPU at {single.pci} is in compute mode {single.compute_mode}: "
            f"start {count}, or NVIDIA's MPS in the job (nvidia-cuda-mps-control -d)"
        )
    bindings = plan_bindings(topology, gpus, allowed, BindingRules(max(ranks // count, 1)), allowed_nodes)
    each = max(count // ranks, 1)
    binding = _together(bindings[rank * each : (rank + 1) * each])
    binding = binding._replace(shared_cores=binding.shared_cores and ranks > 1)
    shown = tuple(dict.fromkeys(g for b in bindings for g in b.gpus[:1])) if all_visible else binding.gpus
    ports = (*ucx_env(binding), *nccl_env(bindings)) if binding.nics else ()
    return RankPlace(binding, (*_device_env(shown), *ports))


def _together(bindings: Sequence[Binding]) -> Binding:
    """Return the binding of a rank that has the GPUs of these workers."""
    policies = {b.memory_policy for b in bindings}
    policy = policies.pop() if len(policies) == 1 else "none"
    return bindings[0]._replace(
        cpuset=CpuSet(pu for b in bindings for pu in b.cpuset),
        gpus=tuple(b.gpus[0] for b in bindings),
        nics=tuple(dict.fromkeys(nic for b in bindings for nic in b.nics)),
        memory_policy=policy,
        memory_nodes=CpuSet(node for b in bindings for node in b.memory_nodes),
        reasons=tuple(dict.fromkeys(reason for b in bindings for reason in b.reasons)),
    )


def _device_env(gpus: Sequence[Gpu]) -> tuple[tuple[str, str], ...]:
    """Return the variables that show these GPUs to CUDA or ROCm; AMD's are named by their ``uuid``."""
    if gpus[0].vendor == "amd":
        return (("ROCR_VISIBLE_DEVICES", ",".join(g.uuid for g in gpus)),)
    return cuda_env(gpus)
