"""What Slurm and PBS say of their queues and nodes, read from recordings, and the draft of a site file made of it."""

from __future__ import annotations

from paths import BATCH
from recordings import records

from hpcgpu import batch
from hpcgpu.config.sites import UNKNOWN, render_draft
from hpcgpu.config.sites.read import read_site
from hpcgpu.model import CpuSet, Gpu, Nic, NumaNode, Result, Topology
from hpcgpu.model.site import Inventory

SLURM = list(records(BATCH / "slurm" / "22.05.8" / "20-inventory.txt"))
PBS = {record.command: record for record in records(BATCH / "pbs" / "release" / "15-pbsnodes.txt")}
REFUSED = Result(("scontrol",), 1, "", "slurm_load_partitions: Unable to contact slurm controller\n")


def recorded(system: str) -> Inventory:
    commands = batch.questions(system)
    if system == "slurm":
        assert [command.argv[0] for command in commands] == [r.command.split()[0] for r in SLURM[:3]]
        answers = SLURM[:3]
    else:
        answers = [PBS["pbsnodes -av -F json"], PBS["qstat -Q -f -F json small"], PBS["qstat -B -f -F json"]]
    results = [Result(c.argv, 0, a.stdout, a.stderr) for c, a in zip(commands, answers, strict=True)]
    return batch.read(system, results)


def draft(found: Inventory, topology: Topology | None = None) -> str:
    text = render_draft(found, "mine", "2026-11-23", topology, {"SYSTEMNAME": "mine"})
    read_site(text, "draft")  # it is a site file
    return text


def test_recorded_queues_and_nodes_are_read() -> None:
    found = recorded("slurm")
    assert [queue.name for queue in found.queues] == ["main", "low", "high"]
    assert {(queue.walltime, queue.node, queue.shared) for queue in found.queues} == {(None, "gpux4", True)}
    node = found.nodes["gpux4"]
    assert (node.gpus, node.cpus, node.job_memory) == (4, 8, "8000 MiB")
    assert (found.default, found.gpu_type, found.array_limit, found.silent) == ("main", "", 1001, ())
    found = recorded("pbs")
    assert [(queue.name, queue.gpus, queue.walltime) for queue in found.queues] == [("small", (1, 2), "00:30:00")]
    assert (found.default, found.array_limit) == ("workq", 10000)
    assert found.nodes["gpux4"].cpus


def test_slurms_limits_and_types() -> None:
    """The older recording's partition with limits, and nodes of sites with types, sockets and other gres."""
    lines = [
        "low|low|4|1:30:00|1-2|8|8000|gpu:4",
        "gpu|gpu*|3|2-00:00:00|1-infinite|64|515000|gpu:a100:4(S:0-1),nvme:1",
        "gpu|gpu*|1|2-00:00:00|1-infinite|96|1030000|gpu:a100:8",
        "cpu|cpu|90|1:00:00|1-4|128|256000|(null)",
    ]
    partitions = "PartitionName=gpu OverSubscribe=EXCLUSIVE\nPartitionName=low OverSubscribe=NO\n"
    answers = [Result(("sinfo",), 0, "\n".join(lines), ""), Result(("scontrol",), 0, partitions, ""), REFUSED]
    found = batch.read("slurm", answers)
    low, gpu = found.queues
    assert (low.nodes, low.walltime, low.shared) == ((1, 2), "01:30:00", True)
    assert (gpu.nodes, gpu.walltime, gpu.shared, gpu.node) == (None, "48:00:00", False, "a100x4")
    assert {name: node.gpus for name, node in found.nodes.items()} == {"gpux4": 4, "a100x4": 4, "a100x8": 8}
    assert found.silent == ("scontrol: slurm_load_partitions: Unable to contact slurm controller",)
    assert f"{UNKNOWN} scontrol: slurm_load_partitions" in draft(found)


def test_a_queue_that_takes_no_job_has_no_limits() -> None:
    for size, time in (("0-5", "0:00"), ("1-0", "0:00"), ("3-2", "n/a")):
        sinfo = Result(("sinfo",), 0, f"gpu|gpu*|3|{time}|{size}|64|515000|gpu:4", "")
        [queue] = batch.read("slurm", [sinfo, REFUSED, REFUSED]).queues
        assert (queue.nodes, queue.walltime) == ((1, 5) if size == "0-5" else None, None)
    limits = '{"walltime": "00:00:00", "nodect": 2}, "resources_min": {"nodect": 3}'
    text = '{"Queue": {"gpu": {"enabled": "True", "resources_max": LIMITS}}}'.replace("LIMITS", limits)
    [queue] = batch.read("pbs", [REFUSED, Result(("qstat",), 0, text, ""), REFUSED]).queues
    assert (queue.nodes, queue.walltime) == (None, None)


def test_nothing_that_is_understood() -> None:
    for system in ("slurm", "pbs"):
        for text in ("", "garbage", "{", '{"nodes": 3}', "|||||||", "a|b|c|d|e|f|g|h"):
            found = batch.read(system, [Result(("x",), 0, text, "")] * 3)
            assert (found.queues, found.nodes) == ((), {})
            assert f"{UNKNOWN} queues: none with GPUs was seen" in draft(found)


def test_a_draft_marks_what_it_could_not_know() -> None:
    text = draft(recorded("slurm"))
    site = read_site(text, "draft")
    assert (site.name, site.batch, site.match.env) == ("mine", "slurm", {"SYSTEMNAME": "mine"})
    assert site.sources["M"].date == "2026-11-23"
    for key in ("title", "account", "rules", "network.ucx", "scratch", "gpux4.numa_cores", "nodes and walltime"):
        assert f"{UNKNOWN} {key}" in text
    assert site.defaults["queue"] == "main"


def test_a_draft_has_the_places_of_a_node_like_this_one() -> None:
    numa = tuple(NumaNode(8 * i, CpuSet([2 * i, 2 * i + 1]), 1 << 30, i) for i in range(2))
    gpus = tuple(Gpu(f"0000:0{i}:00.0", numa_node=home) for i, home in enumerate((8, 8, 0, 0)))
    nics = (Nic("mlx5_0", "0000:80:00.0", numa_node=8), Nic("eth0", "0000:81:00.0", kind="ethernet"))
    here = Topology(numa, tuple(CpuSet([i]) for i in range(4)), gpus, nics)
    node = read_site(draft(recorded("slurm"), here), "draft").nodes["gpux4"]
    assert (node.gpu_numa, node.numa_cores, node.packages, node.cores) == ((1, 1, 0, 0), (2, 2), (0, 1), 4)
    assert [(port.name, port.kind, port.numa) for port in node.ports] == [("mlx5_0", "infiniband", 1)]
    other = Topology(numa, here.cores, gpus[:2])  # a node of another type
    assert not read_site(draft(recorded("slurm"), other), "draft").nodes["gpux4"].gpu_numa
