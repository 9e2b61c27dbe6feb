"""What Slurm and PBS say of their queues and nodes, the draft of a site file, and the memory of a PBS job."""

import json

import pytest
from paths import BATCH
from recordings import Record, block, listing, recorded, records

from hpcgpu import batch
from hpcgpu.batch import pbs
from hpcgpu.config.sites.draft import UNKNOWN, render_draft
from hpcgpu.config.sites.read import read_site
from hpcgpu.errors import SubmitError
from hpcgpu.launch.environment import read_allocation, render_memory
from hpcgpu.model import CpuSet, Gpu, Nic, NumaNode, Result, Topology
from hpcgpu.model.site import Inventory

SLURMS = {path.parent.name: [*records(path)] for path in (BATCH / "slurm").glob("*/20-inventory.txt")}
PBS = {record.command: record for record in records(BATCH / "pbs" / "release" / "15-pbsnodes.txt")}
REFUSED = Result(("scontrol",), 1, "", "slurm_load_partitions: Unable to contact slurm controller\n")
MIB, GIB = 1 << 20, 1 << 30


def inventory_of(system: str, version: str = "22.05.8") -> Inventory:
    commands = batch.questions(system)
    if system == "slurm":
        answers = SLURMS[version][:3]
        assert [command.argv[0] for command in commands] == [r.command.split()[0] for r in answers]
    else:
        answers = [PBS["pbsnodes -av -F json"], PBS["qstat -Q -f -F json small"], PBS["qstat -B -f -F json"]]
    results = [Result(c.argv, 0, a.stdout, a.stderr) for c, a in zip(commands, answers, strict=True)]
    return batch.read(system, results)


def draft(found: Inventory, topology: Topology | None = None) -> str:
    text = render_draft(found, "mine", "2026-11-23", topology, {"SYSTEMNAME": "mine"})
    read_site(text, "draft")  # it is a site file
    return text


@pytest.mark.parametrize("version", SLURMS)
def test_recorded_queues_and_nodes_are_read(version: str) -> None:
    found = inventory_of("slurm", version)
    assert [queue.name for queue in found.queues] == ["main", "low", "high"]
    assert {(queue.walltime, queue.node, queue.shared) for queue in found.queues} == {(None, "gpux4", True)}
    node = found.nodes["gpux4"]
    assert (node.gpus, node.cpus, node.job_memory) == (4, 8, "8000 MiB")
    assert (found.default, found.gpu_type, found.array_limit, found.silent) == ("main", "", 1001, ())
    found = inventory_of("pbs")
    assert [(queue.name, queue.gpus, queue.walltime) for queue in found.queues] == [("small", (1, 2), "00:30:00")]
    assert (found.default, found.array_limit) == ("workq", 10000)
    assert found.nodes["gpux4"].cpus


def test_queues_that_start_no_job_are_left_out() -> None:
    nodes, _, server = (Result(command.argv, 1) for command in batch.questions("pbs"))
    (record,) = records(BATCH / "pbs/run/71-queues.txt")
    found = batch.read("pbs", (nodes, Result(("qstat",), 0, record.stdout), server))
    assert [queue.name for queue in found.queues] == ["workq", "debug", "capped"]  # not "stopped"
    assert found.array_limit == 4  # of the queue with the least
    sinfo = "a|a|1|1:00|1-2|8|8000|gpu:4\nb|b|1|1:00|1-2|8|8000|gpu:4\n"
    partitions = "PartitionName=a State=INACTIVE\nPartitionName=b State=UP\n"
    slurm = batch.read("slurm", [Result((), 0, text) for text in (sinfo, partitions, "")])
    assert [queue.name for queue in slurm.queues] == ["b"]


def test_draft_has_the_default_and_least_walltime_of_a_queue() -> None:
    queues = {"gpu": {"enabled": "True", "resources_default": {"walltime": "01:00:00"}}}
    queues["gpu"]["resources_min"] = {"walltime": "00:10:00"}
    found = batch.read("pbs", [REFUSED, Result(("qstat",), 0, json.dumps({"Queue": queues})), REFUSED])
    words = "a job without walltime has 01:00:00"
    assert read_site(draft(found), "draft").queues[0].text == f"{words}; the shortest walltime is 00:10:00"
    answers = ("a|a|1|1-00:00:00|1-2|8|8000|gpu:4\n", "PartitionName=a DefaultTime=01:00:00 State=UP\n", "")
    assert batch.read("slurm", [Result((), 0, text) for text in answers]).queues[0].text == words


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
    text = draft(inventory_of("slurm"))
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
    node = read_site(draft(inventory_of("slurm"), here), "draft").nodes["gpux4"]
    assert (node.gpu_numa, node.numa_cores, node.packages, node.cores) == ((1, 1, 0, 0), (2, 2), (0, 1), 4)
    assert [(port.name, port.kind, port.numa) for port in node.ports] == [("mlx5_0", "infiniband", 1)]
    other = Topology(numa, here.cores, gpus[:2])  # a node of another type
    assert not read_site(draft(inventory_of("slurm"), other), "draft").nodes["gpux4"].gpu_numa


def granted(record: Record) -> dict[str, int]:
    return dict(pbs.read_memory(Result((), record.returncode, record.stdout, record.stderr)))


def granted_of(exec_host: str, exec_vnode: str, build: str) -> dict[str, int]:
    fields = {"exec_host": f'"{exec_host}"', "exec_vnode": f'"{exec_vnode}"', "mem": '"12gb"'}
    return dict(pbs.read_memory(Result((), 0, listing(build, [block(build, "7.login01", "R", fields)]))))


def test_what_each_node_is_granted_is_read() -> None:
    differ, packed, one, element, whole = map(granted, records(BATCH / "pbs/head/38-memory-granted.txt"))
    assert differ == {"node1": 2 * GIB, "node2": GIB}
    assert packed == {"node1": 600 * MIB}  # two chunks on one node
    assert one == {"node1": GIB, "node2": 0}  # the second chunk has no mem=
    assert element == {"node1": 500 * MIB}
    assert whole == {"node1": 450 * MIB, "node2": 450 * MIB}  # resources_default.mem, of all nodes together


@pytest.mark.parametrize("build", ["head", "release"])
def test_both_builds_say_it(build: str) -> None:
    assert granted(recorded(build, "05-qstat-json-R", 0)) == {"node0001": 2 * GIB, "node0002": 2 * GIB}
    for state in ("06-qstat-json-Q", "14-array"):  # it waits; one without mem=
        assert granted(recorded(build, state, 0 if "Q" in state else 3)) == {}


@pytest.mark.parametrize("build", ["head", "release"])
def test_vnodes_count_for_their_host(build: str) -> None:
    hosts = "node0003/0*8+node0004/0*0"
    vnodes = "(node0003:ncpus=8:mem=4194304kb)+(node0004[0]:ngpus=2:mem=3gb+node0004[1]:mem=1024mb:ngpus=2)"
    assert granted_of(hosts, vnodes, build) == {"node0003": 4 * GIB, "node0004": 4 * GIB}
    assert granted_of(hosts, "(node0003:ncpus=8:mem=4gb)", build) == {}  # of another form than any that was seen
    assert granted_of("n1/0", "(n1:mem=512)", build) == {"n1": 512}
    assert granted_of("n1/0", "(n1:mem=512mw)", build) == {"n1": 4 * GIB}


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (Result((), 127, "", "qstat: there is no such program on this machine"), "there is no such program"),
        (Result((), 124, "", "qstat: no answer in 10 s; it was killed\n"), "no answer in 10 s"),
        (Result((), 153, listing("head", []), "qstat: Unknown Job Id 7.login01\n"), "Unknown Job Id 7.login01$"),
        (Result((), 0, "", ""), "exit code 0, no output"),
    ],
)
def test_no_answer_is_an_error_in_qstats_words(result: Result, words: str) -> None:
    with pytest.raises(SubmitError, match=f"(?m){words}"):
        pbs.read_memory(result)


def told(by_host: dict[str, int], host: str) -> int | None:
    environ = {"PBS_JOBID": "7.login01", "HPCGPU_GRANTED_MEMORY": render_memory(by_host)}
    found = read_allocation(environ, host).memory
    assert found is None or found.source == "mem= of PBS job 7.login01"
    return found.nbytes if found else None


def test_each_rank_reads_what_its_node_has() -> None:
    assert told({}, "n1") is None
    assert render_memory({"n1": GIB, "n2": GIB}) == str(GIB)
    assert {told({"n1": GIB, "n2": GIB}, host) for host in ("n1", "n2.site", "x", "")} == {GIB}
    differ = {"n1": 2 * GIB, "n2": GIB, "n3": 0}
    assert [told(differ, host) for host in ("n1", "n2.site.edu", "n3")] == [2 * GIB, GIB, None]
    assert told(differ, "known-by-another-name") == told(differ, "") == GIB
    assert read_allocation({"PBS_JOBID": "7.login01", "HPCGPU_GRANTED_MEMORY": "n1=2gb,?"}, "n1").memory is None
    assert read_allocation({"HPCGPU_GRANTED_MEMORY": "5"}).memory is None
