"""The host memory of a job on its node: the kernel's limit, the batch system's word, and what was asked for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcgpu.errors import ConfigError
from hpcgpu.launch import read_allocation
from hpcgpu.model import Allocation, CpuSet, Gpu, HostMemory, NodeLayout, NumaNode, RunDocument, Settings, Topology
from hpcgpu.model.allocation import ALL_OF_THE_NODE
from hpcgpu.model.settings import SHARE, Limit
from hpcgpu.plan.binding.memory import asks_granted_memory, plan_host_memory, plan_memory_limit_bytes, share_of
from hpcgpu.plan.binding.workers import NodeFacts, plan_workers
from hpcgpu.report.machine import workers_table

GIB = 1 << 30
NODE = HostMemory(64 * GIB, ALL_OF_THE_NODE)
SIZES = st.integers(min_value=1, max_value=256 * GIB)


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
    words = "memory=8.0 GiB (set by keyword memory of PBSGPUCluster)"
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


def node(memory: HostMemory, allowed: range = range(4), *, in_job: bool = True) -> NodeFacts:
    """Return a node of 4 cores on which a job has some, and two GPUs."""
    gpus = tuple(Gpu(f"0000:0{i}:00.0", f"GPU-{i}", "H200", numa_node=0) for i in range(2))
    topology = Topology((NumaNode(0, CpuSet(range(4)), 64 * GIB, 0),), tuple(CpuSet([i]) for i in range(4)), gpus, ())
    facts = {"topology": topology, "gpus": gpus, "allowed": CpuSet(allowed), "allowed_nodes": CpuSet([0])}
    return NodeFacts(name="n", memory=memory, environ={}, scratch="", in_job=in_job, **facts)


def table(facts: NodeFacts, settings: Settings) -> str:
    specs = plan_workers(settings, facts, NodeLayout(0, (0,), ((0, 1),)))
    return workers_table(facts.topology, [spec for _, spec in specs]).to_text()


def test_the_plan_says_what_limits_the_workers_memory() -> None:
    free = Settings(device_memory_limit=Limit(0))
    said = table(node(HostMemory(2 * GIB, "--mem of the job: SLURM_MEM_PER_NODE=2048")), free)
    assert said.count("limit 1.0 GiB: its share of 2.0 GiB, --mem of the job: SLURM_MEM_PER_NODE=2048") == 1  # for all
    # a node that other jobs may use, and nobody limits this one
    assert table(node(NODE, range(2)), free).count("of 64.0 GiB, all of this node, which other jobs may also use") == 1
    for quiet in (node(NODE), node(NODE, range(2), in_job=False)):
        assert "memory limit" not in table(quiet, free)
    given = Settings(device_memory_limit=Limit(0), memory_limit=Limit(GIB))
    assert "memory limit" not in table(node(HostMemory(2 * GIB, "--mem of the job")), given)


def test_pbs_is_asked_once_for_what_nothing_else_says() -> None:
    pbs, free, given = Allocation(batch="pbs"), Settings(), Settings(memory_bytes=8 * GIB)
    assert asks_granted_memory(pbs, free, "in-allocation")
    assert asks_granted_memory(pbs, given, "in-allocation")  # memory= of Dask's configuration did not make this job
    assert asks_granted_memory(pbs, free, "gang")
    assert not asks_granted_memory(pbs, given, "gang")
    assert not asks_granted_memory(pbs, free, "member")  # each of an array would
    for batch in ("slurm", "local"):
        assert not asks_granted_memory(Allocation(batch=batch), free, "in-allocation")
    # the plan names the job of PBS
    environ = {"PBS_JOBID": "7.login01", "HPCGPU_GRANTED_MEMORY": f"n={2 * GIB},m={GIB}"}
    allocation = read_allocation(environ, "n.site.edu")
    memory = plan_host_memory(NODE, allocation, RunDocument(settings=Settings(memory_bytes=GIB)))
    said = table(node(memory), Settings(device_memory_limit=Limit(0)))
    assert said.count("memory limit 1.0 GiB: its share of 2.0 GiB, mem= of PBS job 7.login01") == 1


def test_what_limits_the_memory_stands_in_errors() -> None:
    job = HostMemory(2 * GIB, "--mem of the job: SLURM_MEM_PER_NODE=2048")
    with pytest.raises(ConfigError, match=r"may use 2\.0 GiB on this node \(--mem of the job: SLURM_MEM_PER_NODE=2048"):
        plan_memory_limit_bytes(Limit(4 * GIB), job, 2)
    with pytest.raises(ConfigError, match=r"2\.0 GiB of host memory in all \(--mem of the job"):
        plan_memory_limit_bytes(SHARE, job, 4, simulated_bytes=4 * GIB)
