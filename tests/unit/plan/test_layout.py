"""Which rank does what, for any world that somebody may start; what its workers start with, and their memory."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcgpu.errors import ConfigError, LaunchError, WorldError
from hpcgpu.launch.environment import read_allocation
from hpcgpu.model import Allocation, CpuSet, Gpu, HostMemory, Nic, NodeLayout, NumaNode, RunDocument, Settings, Topology
from hpcgpu.model.allocation import ALL_OF_THE_NODE
from hpcgpu.model.settings import SHARE, Limit
from hpcgpu.plan.binding.workers import (
    NodeFacts,
    asks_granted,
    node_warnings,
    plan_host_memory,
    plan_memory_limit_bytes,
    plan_workers,
    share_of,
)
from hpcgpu.plan.layout import RankRecord, plan_layout
from hpcgpu.report.machine import workers_table

HOSTS = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 5)), min_size=1, max_size=5)
WORLDS = HOSTS.filter(lambda nodes: any(gpus for _, gpus in nodes))
NODES = tuple(NumaNode(i, CpuSet(range(4 * i, 4 * i + 4)), 8 << 30, i) for i in range(2))
CORES = tuple(CpuSet([2 * i, 2 * i + 1]) for i in range(4))
GPUS = tuple(Gpu(f"0000:0{i}:00.0", f"GPU-{i}", "H200", numa_node=i // 2, memory_bytes=100 << 30) for i in range(4))
NICS = (Nic("mlx5_0", "0000:41:00.0", numa_node=0), Nic("mlx5_1", "0000:42:00.0", numa_node=1))
MACHINE = Topology(NODES, CORES, GPUS, NICS)
SHARES = NodeLayout(0, (0, 1, 2, 3, 4), ((), (0,), (1,), (2,), (3,)))
GIB = 1 << 30
NODE = HostMemory(64 * GIB, ALL_OF_THE_NODE)
SIZES = st.integers(min_value=1, max_value=256 * GIB)


def records(world: list[tuple[int, int]], order: list[int] | None = None) -> list[RankRecord]:
    hosts = [(f"node{n}", gpus) for n, (ranks, gpus) in enumerate(world) for _ in range(ranks)]
    return [RankRecord(rank, *hosts[i]) for rank, i in enumerate(order or range(len(hosts)))]


@given(WORLDS, st.randoms())
def test_every_gpu_has_one_worker_on_a_rank_of_its_node(world: list[tuple[int, int]], random) -> None:
    order = list(range(sum(ranks for ranks, _ in world)))
    random.shuffle(order)
    ranks = records(world, order)
    layout = plan_layout(ranks, len(world))
    host = {r.rank: r.host for r in ranks}
    for node in layout.nodes:
        gpus = world[int(host[node.leader].removeprefix("node"))][1]
        assert {host[r] for r in node.ranks} == {host[node.leader]}
        assert sorted(g for mine in node.workers for g in mine) == list(range(gpus))
        assert node.leader == min(node.ranks)
        shares = [len(w) for r, w in zip(node.ranks, node.workers, strict=True) if r or len(node.ranks) == 1]
        assert max(shares) - min(shares) <= 1
        if 0 in node.ranks and len(node.ranks) > 1:
            assert node.workers[node.ranks.index(0)] == ()
        assert all(layout.node_of(r) is node for r in node.ranks)
    assert layout.worker_count == sum(gpus for _, gpus in world)


@given(WORLDS, st.integers(0, 5), st.integers(1, 3))
def test_each_host_has_the_cpu_workers_on_its_ranks(world: list[tuple[int, int]], beside: int, each: int) -> None:
    ranks = records(world)
    layout = plan_layout(ranks, len(world), each, beside)
    for node, (_, gpus) in zip(layout.nodes, world, strict=True):
        assert sorted(p for mine in node.workers for p in mine) == list(range(gpus * each + beside))
        assert node.cpu_workers == beside
        if 0 in node.ranks and len(node.ranks) > 1:
            assert node.workers[node.ranks.index(0)] == ()
    assert layout.worker_count == sum(gpus * each + beside for _, gpus in world)


def test_ranks_without_a_gpu_take_cpu_workers_first() -> None:
    assert plan_layout(records([(5, 2)]), 1, cpu_workers=3).nodes[0].workers == ((), (0,), (1, 4), (3,), (2,))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(1, 5))
def test_jobs_without_gpus_have_their_cpu_workers(ranks: list[int], workers: int) -> None:
    layout = plan_layout(records([(count, 0) for count in ranks]), cpu_workers=workers, without_gpus=True)
    assert [node.worker_count for node in layout.nodes] == [workers] * len(ranks)


def test_more_ranks_than_gpus_are_idle() -> None:
    node = plan_layout(records([(4, 2)])).nodes[0]
    assert (node.workers, node.idle) == (((), (0,), (1,), ()), (3,))


def test_isolated_ranks_are_nodes_of_their_own() -> None:
    facts = [RankRecord(r, "n", 1, isolated=True) for r in range(3)]
    nodes = plan_layout(facts, cpu_workers=2).nodes  # which they divide
    assert [n.ranks for n in nodes] == [(0,), (1,), (2,)]
    assert [(n.workers, n.cpu_workers) for n in nodes] == [(((0, 1),), 1), (((0, 1),), 1), (((0,),), 0)]
    # so are ranks that see other devices
    facts = [RankRecord(r, "n", 1, devices=str(r)) for r in range(2)] + [RankRecord(2, "m", 2), RankRecord(3, "m", 2)]
    assert [n.ranks for n in plan_layout(facts).nodes] == [(0,), (1,), (2, 3)]


def test_node_without_a_rank_or_world_without_gpus_is_an_error() -> None:
    with pytest.raises(WorldError, match="the job has 3 nodes, but ranks run on 2 of them"):
        plan_layout(records([(1, 1), (1, 1)]), 3)
    with pytest.raises(WorldError, match="the option gpus, as sim:4"):
        plan_layout([RankRecord(0, "n", 0)])


def node(**changes: object) -> NodeFacts:
    facts = {"name": "n", "topology": MACHINE, "gpus": GPUS, "allowed": CpuSet(range(8)), "environ": {}}
    facts |= {"allowed_nodes": CpuSet([0, 1]), "memory": HostMemory(16 << 30, ""), "scratch": "/scratch/run"}
    return NodeFacts(**facts | changes)


def test_a_worker_starts_with_its_gpu_first_and_its_port() -> None:
    specs = plan_workers(Settings(), node(), SHARES)
    assert [rank for rank, _ in specs] == [1, 2, 3, 4]
    spec = specs[2][1]
    assert dict(spec.env) == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "GPU-2,GPU-3,GPU-0,GPU-1",
        "JAX_CUDA_VISIBLE_DEVICES": "0",
        "NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1",  # the same on all workers of the node
        "UCX_NET_DEVICES": "mlx5_1:1",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    assert (spec.name, spec.gpu, spec.simulated) == ("n-2", GPUS[2], False)
    assert spec.memory_limit_bytes == 4 << 30
    assert spec.device_memory_limit_bytes == 80 << 30
    assert {str(s.binding.cpuset) for _, s in specs} == {"0-1", "2-3", "4-5", "6-7"}
    later = plan_workers(Settings(), node(), SHARES, [SHARES])  # names go on where those of another leader end
    assert [s.name for _, s in later] == ["n-4", "n-5", "n-6", "n-7"]


def test_cpu_worker_sees_no_gpu_and_has_a_share_of_memory() -> None:
    shares = plan_layout(records([(5, 2)]), 1, cpu_workers=2).nodes[0]
    specs = [s for _, s in plan_workers(Settings(cpu_workers=2), node(gpus=GPUS[::3]), shares, [SHARES, shares])]
    resources = sorted(f"{s.name} {dict(s.resources)}" for s in specs)
    assert resources == ["n-6 {'GPU': 1.0}", "n-7 {'GPU': 1.0}", "n-cpu2 {'CPU': 1.0}", "n-cpu3 {'CPU': 1.0}"]
    assert {s.memory_limit_bytes for s in specs} == {4 << 30}
    for spec in (s for s in specs if "cpu" in s.name):
        assert (spec.gpu, spec.device_memory_bytes, spec.device_memory_limit_bytes) == (None, 0, 0)
        assert dict(spec.env) == {"CUDA_VISIBLE_DEVICES": "", "UCX_NET_DEVICES": f"{spec.binding.nics[0].name}:1"}
    wanted = Settings(cpu_workers=2, resources={"mine": 2.0})
    assert {s.resources for _, s in plan_workers(wanted, node(), shares)} == {(("mine", 2.0),)}
    table = workers_table(node().topology, specs).to_text()
    assert re.search("^n-cpu2 +none +- ", table, re.M)


def test_what_the_user_set_is_kept_and_said() -> None:
    environ = {"UCX_NET_DEVICES": "mlx5_9:1", "CUDA_VISIBLE_DEVICES": "0", "OMP_NUM_THREADS": "7"}
    _, spec = plan_workers(Settings(), node(environ=environ), SHARES)[0]
    assert "UCX_NET_DEVICES" not in dict(spec.env)
    assert spec.kept_env == ("UCX_NET_DEVICES",)
    # what batch systems and launchers set is a fact to plan from, not a wish
    assert dict(spec.env)["CUDA_VISIBLE_DEVICES"].startswith("GPU-0,")
    _, spec = plan_workers(Settings(env={"UCX_NET_DEVICES": "all"}), node(environ=environ), SHARES)[0]
    assert (dict(spec.env)["UCX_NET_DEVICES"], spec.kept_env) == ("all", ("UCX_NET_DEVICES",))


def test_memory_limits() -> None:
    settings = Settings(memory_limit=Limit(3 << 30), device_memory_limit=Limit(10 << 30))
    _, spec = plan_workers(settings, node(), SHARES)[0]
    assert (spec.memory_limit_bytes, spec.device_memory_limit_bytes) == (3 << 30, 10 << 30)
    with pytest.raises(ConfigError, match="memory_limit"):
        plan_workers(Settings(memory_limit=Limit(5 << 30)), node(), SHARES)
    simulated = tuple(g._replace(vendor="simulated", memory_bytes=1 << 30) for g in GPUS)
    _, spec = plan_workers(Settings(), node(gpus=simulated), SHARES)[0]
    assert spec.memory_limit_bytes == 3 << 30
    assert "CUDA_VISIBLE_DEVICES" not in dict(spec.env)


def test_a_device_limit_above_the_gpu_is_lowered_and_said() -> None:
    big = Settings(device_memory_limit=Limit(200 << 30), sources={"device_memory_limit": "HPCGPU_DEVICE_MEMORY_LIMIT"})
    specs = [s for _, s in plan_workers(big, node(), SHARES)]
    assert {s.device_memory_limit_bytes for s in specs} == {100 << 30}
    (said,) = node_warnings(big, {}, specs)
    assert "HPCGPU_DEVICE_MEMORY_LIMIT" in said
    assert "lowered to 100.0 GiB" in said
    for limit in (0, 0.8, 1.0, 100 << 30):
        fits = Settings(device_memory_limit=Limit(limit))
        assert node_warnings(fits, {}, [s for _, s in plan_workers(fits, node(), SHARES)]) == ()


def test_workers_cannot_share_a_gpu_that_is_for_one_process() -> None:
    alone = [g._replace(compute_mode="EXCLUSIVE_PROCESS") for g in GPUS]
    shares = plan_layout(records([(5, 4)]), 1, workers_per_gpu=2).nodes[0]
    wanted = Settings(workers_per_gpu=2, sources={"workers_per_gpu": "HPCGPU_WORKERS_PER_GPU"})
    with pytest.raises(ConfigError, match=r"HPCGPU_WORKERS_PER_GPU.* at 0000:.* on n is in .* EXCLUSIVE_PROCESS:"):
        plan_workers(wanted, node(gpus=alone), shares)
    assert len(plan_workers(Settings(), node(gpus=alone), SHARES)) == 4
    with pytest.raises(LaunchError, match="n should have 4 GPUs, but only 3"):
        plan_workers(Settings(), node(gpus=GPUS[:3]), SHARES)


def test_without_gpus_each_hosts_reason_is_said_once() -> None:
    blind = [RankRecord(rank, "n", 0, trouble="NVML: Driver Not Loaded") for rank in range(2)]
    with pytest.raises(WorldError, match=r"on any node of this run \(n: NVML: Driver Not Loaded\): in a job, request"):
        plan_layout([*blind, RankRecord(2, "m", 0)])


def test_what_a_launchers_masks_do_is_said() -> None:
    specs = [s for _, s in plan_workers(Settings(), node(), SHARES)]
    apart = {r: CpuSet([r]) for r in range(5)}
    said = node_warnings(Settings(), apart, specs)
    assert re.search("each rank to cores of its own; .*, PUs 0-4 .*--respect-launcher", *said)
    assert node_warnings(Settings(respect_launcher=True), apart, specs) == ()
    assert node_warnings(Settings(), dict.fromkeys(range(5), CpuSet(range(8))), specs) == ()
    few = [s for _, s in plan_workers(Settings(), node(allowed=CpuSet([0, 1])), SHARES)]
    assert node_warnings(Settings(), {0: CpuSet([0, 1])}, few)[0].startswith("4 workers share cores 0-1; in a job")


def test_slingshot_is_tcp_on_the_nearest_interface() -> None:
    hsn = tuple(Nic(f"cxi{i}", f"0000:4{i}:00.0", kind="slingshot", numa_node=i, interface=f"hsn{i}") for i in range(2))
    there = node(topology=MACHINE._replace(nics=hsn), interfaces=frozenset({"hsn0", "eth0"}))
    specs = [s for _, s in plan_workers(Settings(), there, SHARES)]
    assert [s.binding.interface for s in specs] == ["hsn0", "hsn0", "", ""]
    assert "hsn1 has no IP address" in specs[2].binding.reasons[-1]
    assert not any(name.startswith(("UCX", "NCCL_IB")) for s in specs for name, _ in s.env)
    assert [dict(s.env).get("NCCL_SOCKET_IFNAME") for s in specs] == ["=hsn0", "=hsn0", None, None]
    assert [dict(s.env).get("GLOO_SOCKET_IFNAME") for s in specs] == ["hsn0", "hsn0", None, None]
    assert "no transport" in node_warnings(Settings(protocol="ucx"), {}, specs)[0]


def test_a_ucx_without_infiniband_gets_no_port_and_it_is_said() -> None:
    ports = tuple(Nic(f"mlx5_{i}", f"0000:4{i}:00.0", numa_node=i) for i in range(2))
    fast = MACHINE._replace(nics=ports)
    there = node(topology=fast, ucx_without_ib="/venv/libucx/lib")
    specs = [s for _, s in plan_workers(Settings(), there, SHARES)]
    assert not any(name.startswith("UCX") for s in specs for name, _ in s.env)
    assert {dict(s.env)["NCCL_IB_HCA"] for s in specs} == {"=mlx5_0:1,mlx5_1:1"}  # NCCL drives the ports itself
    assert all("/venv/libucx/lib drives no InfiniBand" in s.binding.reasons[-1] for s in specs)
    (said,) = node_warnings(Settings(protocol="ucx"), {}, specs, there.ucx_without_ib)
    assert "RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY" in said
    assert node_warnings(Settings(), {}, specs, there.ucx_without_ib) == ()
    chosen = Settings(env={"UCX_NET_DEVICES": "ib0"})
    _, spec = plan_workers(chosen, there, SHARES)[0]
    assert (dict(spec.env)["UCX_NET_DEVICES"], spec.binding.reasons) == ("ib0", specs[0].binding.reasons[:-1])
    specs = [s for _, s in plan_workers(Settings(), node(topology=fast), SHARES)]
    assert {dict(s.env)["UCX_NET_DEVICES"] for s in specs} == {"mlx5_0:1", "mlx5_1:1"}


def test_the_users_interface_takes_the_place_of_the_planned_one() -> None:
    """``interface=`` is of all workers, whatever is planned for each; the ports stay."""
    ports = tuple(Nic(f"mlx5_{i}", f"0000:4{i}:00.0", numa_node=i, interface=f"ib{i}") for i in range(2))
    there = node(topology=MACHINE._replace(nics=ports), interfaces=frozenset({"ib0", "ib1", "eth0"}))
    assert {s.binding.interface for _, s in plan_workers(Settings(), there, SHARES)} == {"ib0", "ib1"}
    specs = [s for _, s in plan_workers(Settings(interface="eth0"), there, SHARES)]
    assert {s.binding.interface for s in specs} == {"eth0"}
    assert {s.binding.nics[0].name for s in specs} == {"mlx5_0", "mlx5_1"}
    assert specs[0].binding.reasons == ("interface='eth0' is asked for: Dask's own traffic is not on ib0",)
    plain = plan_workers(Settings(interface="eth0"), node(interfaces=frozenset({"eth0"})), SHARES)
    assert {s.binding.interface for _, s in plain} == {"eth0"}  # no port, so nothing is planned
    given = Settings(interface="hsn0", sources={"interface": "--interface"})
    why = re.escape("interface='hsn0' (set by --interface): n has no such interface with an IP address; it has: eth0")
    with pytest.raises(ConfigError, match=why):
        plan_workers(given, node(interfaces=frozenset({"eth0"})), SHARES)


def test_memory_bound_to_nodes_fits_them() -> None:
    bound = Settings(memory_policy="bind")
    specs = plan_workers(bound, node(memory=HostMemory(64 << 30, "")), SHARES)
    assert {s.memory_limit_bytes for _, s in specs} == {4 << 30}
    with pytest.raises(ConfigError, match="memory_policy='bind' binds a worker to NUMA nodes 0, which have"):
        plan_workers(replace(bound, memory_limit=Limit(5 << 30)), node(memory=HostMemory(64 << 30, "")), SHARES)


def test_several_workers_of_a_gpu_share_its_memory() -> None:
    shares = plan_layout(records([(5, 4)]), 1, workers_per_gpu=2).nodes[0]
    assert shares.workers == ((), (0, 1), (2, 3), (4, 5), (6, 7))
    specs = plan_workers(Settings(workers_per_gpu=2, device_memory_limit=Limit(0.5)), node(), shares)
    first = [(rank, s.name, s.gpu.uuid) for rank, s in specs[:3]]
    assert first == [(1, "n-0", "GPU-0"), (1, "n-1", "GPU-0"), (2, "n-2", "GPU-1")]
    assert {(s.device_memory_bytes, s.device_memory_limit_bytes) for _, s in specs} == {(50 << 30, 25 << 30)}
    assert {dict(s.env)["CUPY_GPU_MEMORY_LIMIT"] for _, s in specs} == {"48%"}
    kept = plan_workers(Settings(workers_per_gpu=2), node(environ={"CUPY_GPU_MEMORY_LIMIT": "40%"}), shares)
    assert all("CUPY_GPU_MEMORY_LIMIT" not in dict(s.env) for _, s in kept)


@pytest.mark.parametrize("theirs", ["XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"])
def test_jax_has_its_share_of_a_gpu_unless_the_user_says_it(theirs: str) -> None:
    """JAX raises if both names of the fraction are set."""
    shares, settings = plan_layout(records([(5, 4)]), 1, workers_per_gpu=2).nodes[0], Settings(workers_per_gpu=2)
    assert {dict(s.env)["XLA_CLIENT_MEM_FRACTION"] for _, s in plan_workers(settings, node(), shares)} == {"0.48"}
    for more, environ in (({theirs: "0.3"}, {}), ({}, {theirs: "0.3"})):
        for _, spec in plan_workers(replace(settings, env=more), node(environ=environ), shares):
            assert {k: v for k, v in spec.env if k.endswith("FRACTION")} == more


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Allocation, RunDocument | None]:
    """A job, the memory that its batch system says, and the run document in it with the memory that we asked for."""
    said = draw(st.none() | st.builds(HostMemory, SIZES, st.just("--mem of the job")))
    batch = draw(st.sampled_from(("slurm", "pbs", "local")))
    asked = Settings(memory_bytes=draw(st.none() | SIZES), sources={"memory": "keyword memory"})
    shape = draw(st.sampled_from(("gang", "member", "in-allocation")))
    run = draw(st.sampled_from((None, RunDocument(settings=asked, shape=shape))))
    return Allocation(batch=batch, memory=said if batch != "local" else None), run


@given(jobs(), st.builds(HostMemory, SIZES, st.sampled_from((ALL_OF_THE_NODE, "cgroup /job_7"))))
def test_no_limit_is_exceeded_and_the_one_that_holds_is_named(
    job: tuple[Allocation, RunDocument | None], granted: HostMemory
) -> None:
    allocation, run = job
    found = plan_host_memory(granted, allocation, run)
    limits = [granted, *([allocation.memory] if allocation.memory else [])]
    asked = run.settings.memory_bytes if run else None
    ours = run is not None and (run.shape != "in-allocation" or allocation.batch == "pbs")
    if asked and ours and allocation.batch != "local" and allocation.memory is None:
        limits.append(HostMemory(asked, "memory="))
    assert found.nbytes == min(m.nbytes for m in limits)
    (named,) = {m.source for m in limits if m.nbytes == found.nbytes and found.source.startswith(m.source)}
    assert found.source.startswith(named)
    # what the kernel enforces is named where both say the same
    assert found == granted or found.nbytes < granted.nbytes


def test_requested_memory_counts_if_the_batch_system_is_silent() -> None:
    asked = Settings(memory_bytes=8 * GIB, sources={"memory": "keyword memory of PBSGPUCluster"})
    gang, own = RunDocument(settings=asked, shape="gang"), RunDocument(settings=asked)
    words = "memory='8.0 GiB' (set by keyword memory of PBSGPUCluster)"
    assert plan_host_memory(NODE, Allocation(batch="pbs"), gang) == (8 * GIB, words)
    # a directive of the user's own, --mem=16G, is what Slurm grants then
    slurm = Allocation(batch="slurm", memory=HostMemory(16 * GIB, "--mem"))
    assert plan_host_memory(NODE, slurm, gang) == (16 * GIB, "--mem")
    # an allocation of the user's own was made without our figure: salloc --mem=0
    assert plan_host_memory(NODE, Allocation(batch="slurm"), own) == NODE
    assert plan_host_memory(NODE, Allocation(), gang) == NODE


@given(SIZES, st.lists(st.integers(min_value=1, max_value=16), min_size=1, max_size=8))
def test_several_leaders_of_a_node_take_no_more_than_there_is(nbytes: int, workers: list[int]) -> None:
    memory = HostMemory(nbytes, "--mem of the job")
    parts = [share_of(memory, each, sum(workers)) for each in workers]
    assert sum(part.nbytes for part in parts) <= nbytes
    assert all("--mem of the job" in part.source for part in parts)
    assert len(parts) > 1 or parts == [memory]


def table(memory: HostMemory, settings: Settings, **changes: object) -> str:
    """Return what is said of the workers of two GPUs in a job with this memory."""
    facts = node(memory=memory, gpus=GPUS[:2], **{"in_job": True, **changes})
    specs = plan_workers(settings, facts, NodeLayout(0, (0,), ((0, 1),)))
    return workers_table(facts.topology, [spec for _, spec in specs]).to_text()


def test_the_plan_says_what_limits_the_workers_memory() -> None:
    free = Settings(device_memory_limit=Limit(0))
    said = table(HostMemory(2 * GIB, "--mem of the job: SLURM_MEM_PER_NODE=2048"), free)
    assert said.count("limit 1.0 GiB: its share of 2.0 GiB, --mem of the job: SLURM_MEM_PER_NODE=2048") == 1  # for all
    # a node that other jobs may use, and nobody limits this one
    half = {"allowed": CpuSet(range(4))}
    assert table(NODE, free, **half).count("of 64.0 GiB, all of this node, which other jobs may also use") == 1
    assert "memory limit" not in table(NODE, free)
    assert "memory limit" not in table(NODE, free, **half, in_job=False)
    given = Settings(device_memory_limit=Limit(0), memory_limit=Limit(GIB))
    assert "memory limit" not in table(HostMemory(2 * GIB, "--mem of the job"), given)


def test_pbs_is_asked_once_for_what_nothing_else_says() -> None:
    pbs = Allocation(batch="pbs")
    assert asks_granted(pbs, "in-allocation")
    assert asks_granted(pbs, "gang")
    assert not asks_granted(pbs, "member")  # each of an array would
    for batch in ("slurm", "local"):
        assert not asks_granted(Allocation(batch=batch), "in-allocation")
    # the plan names the job of PBS
    environ = {"PBS_JOBID": "7.login01", "HPCGPU_GRANTED_MEMORY": f"n={2 * GIB},m={GIB}"}
    allocation = read_allocation(environ, "n.site.edu")
    memory = plan_host_memory(NODE, allocation, RunDocument(settings=Settings(memory_bytes=GIB)))
    said = table(memory, Settings(device_memory_limit=Limit(0)))
    assert said.count("memory limit 1.0 GiB: its share of 2.0 GiB, mem= of PBS job 7.login01") == 1


def test_what_limits_the_memory_stands_in_errors() -> None:
    job = HostMemory(2 * GIB, "--mem of the job: SLURM_MEM_PER_NODE=2048")
    with pytest.raises(ConfigError, match=r"may use 2\.0 GiB on this node \(--mem of the job: SLURM_MEM_PER_NODE=2048"):
        plan_memory_limit_bytes(Limit(4 * GIB), job, 2)
    with pytest.raises(ConfigError, match=r"2\.0 GiB of host memory in all \(--mem of the job"):
        plan_memory_limit_bytes(SHARE, job, 4, simulated_bytes=4 * GIB)
