"""The place of a rank of any launcher: on every machine that of the worker of its GPU."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from machines import DOCUMENTED, GIB, GRANTED, MACHINES, gpus_of, machine, pus

from hpcgpu.errors import BindingError
from hpcgpu.model import Binding, BindingRules, CpuSet, Gpu, Settings, Topology, WorkerSpec
from hpcgpu.model.settings import NO_LIMIT
from hpcgpu.plan.binding.bindings import simulated_gpus
from hpcgpu.plan.binding.ranks import plan_rank
from hpcgpu.plan.binding.workers import facts_from, plan_whole_node

ALL = [*MACHINES, *(f"documented-{name}" for name in DOCUMENTED)]


def described(name: str) -> tuple[Topology, Sequence[Gpu], CpuSet]:
    document = name.removeprefix("documented-")
    topology = machine(name) if document == name else DOCUMENTED[document]
    # workers and ranks are of NVIDIA's GPUs, or of simulated ones where a machine has none of them
    gpus = tuple(g._replace(uuid=g.uuid or f"GPU-{g.pci}") for g in gpus_of(topology) if g.can_run)
    gpus = gpus or simulated_gpus(topology, 4, GIB, "node")
    return topology._replace(allowed=None), gpus, GRANTED.get(document) or pus(topology)


def workers(name: str, each: int) -> tuple[WorkerSpec, ...]:
    topology, gpus, allowed = described(name)
    facts = replace(facts_from(topology, name), allowed=allowed)
    return plan_whole_node(Settings(workers_per_gpu=each, memory_limit=NO_LIMIT), facts, tuple(gpus))


def place_of(binding: Binding) -> tuple[object, ...]:
    policy = (binding.memory_policy, binding.memory_nodes)
    return binding.cpuset, binding.gpus[0], binding.nics, policy, binding.shared_cores, binding.interface


@pytest.mark.parametrize("each", [1, 2])
@pytest.mark.parametrize("name", ALL)
def test_rank_has_the_place_of_the_worker_of_its_gpu(name: str, each: int) -> None:
    topology, gpus, allowed = described(name)
    specs = workers(name, each)
    assert len(specs) == len(gpus) * each
    for rank, spec in enumerate(specs):
        place = plan_rank(topology, gpus, allowed, rank, len(specs), topology.allowed_nodes)
        assert place_of(place.binding) == place_of(spec.binding)
        assert place.binding.gpus == spec.binding.gpus[:1], "another rank's GPU is visible"
        env = dict(spec.env)
        if "CUDA_VISIBLE_DEVICES" in env:
            assert dict(place.env)["CUDA_VISIBLE_DEVICES"] == env["CUDA_VISIBLE_DEVICES"].partition(",")[0]
        ports = ("UCX_NET_DEVICES", "UCX_MAX_RNDV_RAILS", "NCCL_IB_HCA")
        assert [dict(place.env).get(port) for port in ports] == [env.get(port) for port in ports]


@pytest.mark.parametrize("name", ALL)
def test_rank_of_several_gpus_has_the_places_of_all(name: str) -> None:
    topology, gpus, allowed = described(name)
    bindings = [spec.binding for spec in workers(name, 1)]
    for ranks in {n for n in (1, 2) if len(gpus) % n == 0}:
        each = len(gpus) // ranks
        for rank in range(ranks):
            mine = bindings[rank * each : (rank + 1) * each]
            place = plan_rank(topology, gpus, allowed, rank, ranks, topology.allowed_nodes)
            assert place.binding.gpus == tuple(b.gpus[0] for b in mine) == tuple(gpus[rank * each : (rank + 1) * each])
            assert place.binding.cpuset == CpuSet(pu for b in mine for pu in b.cpuset)
            assert set(place.binding.nics) == {nic for b in mine for nic in b.nics}
            assert place.binding.memory_nodes == CpuSet(node for b in mine for node in b.memory_nodes)


def test_rules_have_the_defaults_of_the_settings() -> None:
    assert BindingRules() == Settings().binding_rules


def test_ranks_that_do_not_match_gpus_are_refused() -> None:
    topology, gpus, allowed = described("turin-4gpu-nvml")
    with pytest.raises(BindingError, match=r"3 ranks .* do not match 4 GPUs .* start 1, 2, 4 or a multiple of 4"):
        plan_rank(topology, gpus, allowed, 0, 3)
    with pytest.raises(BindingError, match="6 ranks"):
        plan_rank(topology, gpus, allowed, 5, 6)


def test_ranks_do_not_share_a_gpu_for_one_process() -> None:
    topology, gpus, allowed = described("turin-4gpu-nvml")
    exclusive = [g._replace(compute_mode="EXCLUSIVE_PROCESS") for g in gpus]
    with pytest.raises(BindingError, match=r"8 ranks share 4 GPUs, but .* EXCLUSIVE_PROCESS: start 4, or NVIDIA's MPS"):
        plan_rank(topology, exclusive, allowed, 0, 8)
    assert plan_rank(topology, exclusive, allowed, 0, 4).binding.gpus == (exclusive[0],)


def test_all_visible_lists_gpus_by_local_rank() -> None:
    topology, gpus, allowed = described("turin-4gpu-nvml")
    places = [plan_rank(topology, gpus, allowed, rank, 4, all_visible=True) for rank in range(4)]
    assert {dict(p.env)["CUDA_VISIBLE_DEVICES"] for p in places} == {",".join(g.uuid for g in gpus)}
    assert [p.binding.gpus for p in places] == [(gpu,) for gpu in gpus]


def test_amd_gpus_are_named_for_rocm() -> None:
    topology = DOCUMENTED["lumi-g"]
    gpus = tuple(g._replace(uuid=str(i)) for i, g in enumerate(sorted(topology.gpus, key=lambda g: g.pci)))
    assert {g.vendor for g in gpus} == {"amd"}
    allowed = GRANTED["lumi-g"]
    places = [plan_rank(topology, gpus, allowed, rank, 8) for rank in range(8)]
    assert [dict(p.env)["ROCR_VISIBLE_DEVICES"] for p in places] == [str(i) for i in range(8)]
    assert all("CUDA_VISIBLE_DEVICES" not in dict(p.env) for p in places)


def test_ports_that_a_user_set_stay() -> None:
    topology, gpus, allowed = described("turin-4gpu-nvml")
    place = plan_rank(topology, gpus, allowed, 0, 1)
    assert {"UCX_NET_DEVICES", "UCX_MAX_RNDV_RAILS", "NCCL_IB_HCA"} < place.changes({}).keys()
    left = place.changes({"UCX_NET_DEVICES": "mlx5_9:1"}).keys()
    assert not left & {"UCX_NET_DEVICES", "UCX_MAX_RNDV_RAILS"}
    assert "NCCL_IB_HCA" in left
    assert place.changes({"CUDA_VISIBLE_DEVICES": "0"})["CUDA_VISIBLE_DEVICES"].startswith("GPU-")
