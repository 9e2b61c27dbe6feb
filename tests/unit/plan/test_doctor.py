"""The doctor's checks on facts: what is named, and what is advised."""

import inspect
import multiprocessing.connection
import re
import tempfile
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from paths import ROOT, TOPOLOGIES

from hpcgpu.model import Hop, Nic
from hpcgpu.model.allocation import Limits
from hpcgpu.plan.doctor import facts, findings, login, nodes
from hpcgpu.plan.doctor.findings import CheckResult, Verdict, examine, exit_code
from hpcgpu.plan.doctor.login import LOGIN_CHECKS
from hpcgpu.plan.doctor.nodes import JOB_CHECKS, LONGEST_TMPDIR, checks_for
from hpcgpu.plan.jobs.needs import Size, shared_imports
from hpcgpu.topology import hwloc_xml

FREE = Limits(files=65536, processes=-1, locked_bytes=-1)
MANY = Size(workers=1000, nodes=125, per_node=8)
PACKAGES = {"hpcgpu": "1", "dask": "2026.1", "distributed": "2026.1"}
PYTHON = facts.Python(path="/home/env/bin/python", version="3.11.2", machine="x86_64", packages=PACKAGES)
DISK = facts.Folder(path="/local", kind="xfs", free_bytes=1 << 40, free_files=1 << 20, create_s=1e-4, bytes_per_s=2e9)
SHARED = replace(DISK, path="/home/me", kind="lustre", network=True)
LOGIN = login.LoginFacts(
    request=findings.ok("slurm would take the job: 2026-11-23T06:38:00 on node[1-2] in partition main"),
    python=PYTHON,
    environment=replace(SHARED, path="/home/env"),
    home=SHARED,
    scratch=DISK,
    limits=FREE,
    size=login.judge_size(MANY, FREE, is_certain=True),
    start=login.judge_start(""),
    names=facts.Names(host="login1", resolved=("10.0.0.9",), interfaces=(("ib0", "10.0.0.9"),)),
)
NIC = Nic("mlx5_0", "0000:01:00.0")
REFUSED = "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified"
NO_ACCOUNT = replace(LOGIN, request=findings.failed(REFUSED, login.refusal_advice("slurm", REFUSED)))
WARNED, FAILED = Verdict.WARNING, Verdict.FAILED
OLD = replace(PYTHON, broken="distributed 2025.3 (hpcgpu needs 2025.4 or newer)")
SKEWED = replace(PYTHON, packages={**PACKAGES, "distributed": "2025.9"})


def node(host: str, other: str) -> facts.NodeFacts:
    link = facts.Link(source=host, target=other, interface="ib0", address=f"10.0.0.{other[-1]}", took_s=1e-3)
    return facts.NodeFacts(
        host=host,
        python=PYTHON,
        limits=FREE,
        **{"cpus": 32, "cores": 64, "memory_bytes": 256 << 30, "temporary": "/tmp"},
        **{"gpus": ("H100",) * 4, "driver": "570.86", "nics": (NIC,), "hops": (Hop("0000:03:00.0", NIC.pci, 2, 1),)},
        scratch=DISK,
        ucx=facts.Ucx(version="1.18.0", transports=("rc_mlx5", "tcp")),
        links=(link,),
    )


TRIAL = facts.TrialFacts(
    **{"job_id": "7", "folder": "/home/me/.hpcgpu/runs/x", "requested_nodes": 2, "requested_gpus": 4, "protocol": ""},
    python=PYTHON,
    nodes=(node("node1", "node2"), node("node2", "node1")),
    launcher=facts.Launcher(command="srun --mpi=pmix", library="Open MPI v4.1.4", worlds=(3, 3, 3), exit_code=0),
    links=(facts.Link(source="login1", target="node1", interface="ib0", address="10.0.0.1", took_s=1e-3),),
)


def second(**changes: Any) -> facts.TrialFacts:
    """Return the facts of a job of which one node differs."""
    return replace(TRIAL, nodes=(TRIAL.nodes[0], replace(TRIAL.nodes[1], **changes)))


def found(facts: login.LoginFacts | facts.TrialFacts, name: str) -> CheckResult:
    return next(finding for finding in every(facts) if finding.name == name)


def every(facts: login.LoginFacts | facts.TrialFacts) -> tuple[CheckResult, ...]:
    return examine(LOGIN_CHECKS, facts) if isinstance(facts, login.LoginFacts) else examine(checks_for(facts), facts)


def cut(link: facts.Link) -> facts.Link:
    return replace(link, error="timed out")


def dead_nic() -> facts.TrialFacts:
    """Return a node as it was recorded (four H200): ports nearest to its GPUs are down."""
    machine = hwloc_xml.read_file((TOPOLOGIES / "drm-4gpu.xml").read_text())
    return second(nics=machine.nics, hops=machine.hops)


LOST = replace(TRIAL, nodes=(), ended="job 7 has ended: FAILED, exit code 1")
(LINK,) = TRIAL.nodes[1].links
CUT, TCP = cut(LINK), facts.Ucx(version="1.21.0", transports=("tcp",))
FEW_FILES = replace(second(limits=FREE._replace(files=3000)), size=MANY._replace(workers=2000))
FULL, LOCKED, LATE = replace(DISK, free_bytes=4096), FREE._replace(locked_bytes=65536), replace(LINK, clock_s=-90.0)
# Facts, the check that names the fault, its verdict, and what it says.
FAULTS: dict[str, tuple[login.LoginFacts | facts.TrialFacts, str, Verdict, str]] = {
    "wrong account": (NO_ACCOUNT, "job request", FAILED, "Invalid account.*--account NAME.*sacctmgr show associations"),
    "closed port": (second(links=(CUT,)), "node to node", FAILED, "at 10.0.0.1 .ib0.: timed out.*firewall.*--int"),
    "version skew": (second(python=SKEWED), "versions", FAILED, "is 2026.1 here and 2025.9 on node2.*--python"),
    "package too old": (replace(LOGIN, python=OLD), "Python", FAILED, "distributed 2025.3 .hpcgpu needs 2025.4.*pip"),
    "no GIL": (replace(LOGIN, python=replace(PYTHON, version="3.14.0 free-threaded")), "Python", WARNED, "the GIL"),
    "slow home, not shared": (replace(LOGIN, home=replace(DISK, bytes_per_s=1e6)), "home", WARNED, "this machine only"),
    "home not shared": (LOST, "job", FAILED, "0 of 2 nodes.*exit code 1.*home is not shared"),
    "MPI that does not fit": (
        *(replace(TRIAL, launcher=facts.Launcher(error="Open MPI 5 needs pmix")), "launcher and MPI", FAILED),
        "needs pmix.*module load.*--rendezvous file",
    ),
    "scratch full": (second(scratch=FULL), "scratch of the nodes", FAILED, "node2: /local .xfs.*full.*--local-dir"),
    "memlock": (
        *(replace(second(limits=LOCKED), protocol="ucx"), "locked memory in the job", FAILED),
        "node2: 64.0 KiB of memory may be locked.*memlock unlimited.*--protocol",
    ),
    "low hard limit": (
        *(replace(LOGIN, limits=FREE._replace(files=1024)), "limits", WARNED),
        "1024 open files.*ask the administrators for a higher hard limit, which hpcgpu takes",
    ),
    "few files in the job": (
        *(FEW_FILES, "limits in the job", FAILED),
        r"node2: 2,000 workers need 4,\d+ open files of the scheduler; the hard limit .ulimit -Hn. is 3,000.*adminis",
    ),
    "few files on the login node": (
        *(replace(LOGIN, size=login.judge_size(MANY, Limits(1024), is_certain=False)), "size of the cluster", WARNED),
        r"1,000 workers need 2,\d+ open files of the scheduler; the hard limit .ulimit -Hn. is 1,024.*administrators",
    ),
    "few processes": (
        *(replace(second(limits=FREE._replace(job_processes=30)), size=MANY), "limits in the job", WARNED),
        r"node2: 1,000 workers need \d+ processes and threads of a node; the limit .ulimit -u, pids.max. is 30",
    ),
    "32 nodes start from Lustre": (
        *(replace(LOGIN, start=login.judge_start(shared_imports(32, "lustre"))), "start of the nodes", WARNED),
        r"32 nodes import at least [\d,]+ files each from lustre.*--environment stage",
    ),
    "no copies": (second(copy_obstacle="yama=2"), "values within a node", WARNED, "node2: yama=2.*process_vm_readv"),
    "UCX without InfiniBand": (
        *(replace(second(ucx=replace(TCP, folder="/a", has_ib=False)), protocol="ucx"), "UCX", WARNED),
        "drives no InfiniBand .*RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY",
    ),
    "UCX without rdma-core": (replace(second(ucx=TCP), protocol="ucx"), "UCX", FAILED, "rdma-core"),
    "dead NIC": (dead_nic(), "network ports", WARNED, "is down.*nearest to the GPU at.*UCX_NET_DEVICES"),
    "no GPU granted": (second(gpus=(), driver=""), "GPUs", FAILED, "node2 shows 0 of 4 GPUs.*--queue.*hpcgpu plan"),
    "GPUs for one process": (second(compute_modes=("EXCLUSIVE_PROCESS",) * 4), "GPUs", WARNED, "node2.*EXCLUSIVE.*MPS"),
    "no libnvidia-ml": (
        *(second(gpus=(), driver="", no_driver="NVML: not found (apptainer --nv)"), "GPUs", FAILED),
        "node2 shows 0 of 4 GPUs; NVML: not found .apptainer --nv.",
    ),
    "no IMEX channel": (
        *(second(nvlink_domain="ab", imex_channel=False), "NVLink of nodes", WARNED),
        "^node2: NVLink leads to other nodes, but no IMEX channel.*switch/nvidia_imex",
    ),
    "two NVLink domains": (
        *(replace(TRIAL, nodes=tuple(replace(n, nvlink_domain=n.host) for n in TRIAL.nodes)), "NVLink of nodes"),
        *(WARNED, "of 2 NVLink domains: node1; node2.*--segment"),
    ),
    "cgroup of one core": (second(cpus=1), "CPUs", WARNED, "node2: 1 of 64 CPUs.*--cores-per-gpu"),
    "clock skew": (second(links=(LATE,)), "clocks", WARNED, "clock of node1 is 90.0 s behind that of node2.*chronyd"),
    "long TMPDIR": (second(temporary="/tmp/" + "x" * 90), "socket paths", WARNED, "TMPDIR has 95 bytes.*TMPDIR=/tmp"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_with_its_advice_and_nothing_else_is(fault: str) -> None:
    facts, name, verdict, pattern = FAULTS[fault]
    finding = found(facts, name)
    assert finding.verdict is verdict
    assert re.search(pattern, f"{finding.seen} | {finding.advice}", re.DOTALL)
    others = every(facts)
    assert [x.name for x in others if x.verdict not in (Verdict.OK, Verdict.NOT_LOOKED_AT)] == [name]


def test_all_is_well() -> None:
    findings = (*every(LOGIN), *every(TRIAL))
    assert {x.verdict for x in findings} == {Verdict.OK}, [x for x in findings if x.verdict is not Verdict.OK]
    assert not any(x.advice for x in findings)
    assert exit_code(findings) == 0


def test_one_nvlink_domain_is_named_with_its_nodes() -> None:
    joined = replace(TRIAL, nodes=tuple(replace(node, nvlink_domain="ab") for node in TRIAL.nodes))
    assert found(joined, "NVLink of nodes").seen == "one domain with IMEX: node1, node2"


def test_clock_off_by_a_day_fails() -> None:
    assert exit_code(every(second(cpus=1))) == 0
    off = second(links=(replace(LINK, clock_s=90000.0),))
    assert found(off, "clocks").verdict is Verdict.FAILED
    assert "the clock of node1 is 90000.0 s ahead of that of node2" in found(off, "clocks").seen
    assert exit_code(every(off)) == 1


@pytest.mark.parametrize("check", [c.name for c in LOGIN_CHECKS])
def test_what_is_not_known_was_not_looked_at_and_why(check: str) -> None:
    fact = next(c.fact for c in LOGIN_CHECKS if c.name == check)
    finding = found(login.LoginFacts(unknown={fact: "no answer in 3 s"}), check)
    assert finding == CheckResult(Verdict.NOT_LOOKED_AT, "no answer in 3 s", name=check)


def test_doctor_names_a_node_with_missing_facts() -> None:
    unknown = second(ucx=None, unknown={"ucx": "there is no ucx_info"})
    assert found(unknown, "UCX").verdict is Verdict.OK
    none = replace(unknown, nodes=(replace(unknown.nodes[1]), unknown.nodes[1]))
    assert found(none, "UCX") == CheckResult(Verdict.NOT_LOOKED_AT, "node2: there is no ucx_info", name="UCX")


def test_one_open_interface_between_two_nodes_is_enough() -> None:
    link = TRIAL.nodes[1].links[0]
    links = (cut(link), replace(link, interface="eth0", address="10.1.0.1"))
    finding = found(second(links=links), "node to node")
    assert finding.verdict is Verdict.WARNING
    assert "--interface eth0" in finding.advice


@pytest.mark.parametrize(
    ("launcher", "words"),
    [
        (facts.Launcher(command="pbsdsh --", worlds=(1, 1), library="MPICH 4", exit_code=0), "in worlds of 1, 1"),
        (facts.Launcher(command="mpirun", exit_code=14, output="PMIx server unreachable"), "exit code 14: PMIx server"),
        (facts.Launcher(command="mpirun", exit_code=124), "told of its MPI world, and ended with exit code 124"),
    ],
)
def test_ranks_that_do_not_meet_are_a_failure(launcher: facts.Launcher, words: str) -> None:
    finding = found(replace(TRIAL, launcher=launcher), "launcher and MPI")
    assert finding.verdict is Verdict.FAILED
    assert words in finding.seen
    assert "--rendezvous file" in finding.advice
    command = "mpirun --bind-to none -x HOME -x PATH -n 3 env A=1 B=2"  # shown without the variables
    met = facts.Launcher(command=command, library="Open MPI v5.0.11", worlds=(3, 3, 3), exit_code=0)
    seen = found(replace(TRIAL, launcher=met), "launcher and MPI").seen
    assert seen == "mpirun --bind-to none -n 3: 3 ranks of Open MPI v5.0.11 met"


@pytest.mark.parametrize(
    ("granted", "words", "advice"),
    [(0, "0 of 4 GPUs (granted: 0)", "--queue"), (4, "0 of 4 GPUs (granted: 4)", "nvidia-smi")],
)
def test_doctor_tells_silent_gpus_from_gpus_not_granted(granted: int, words: str, advice: str) -> None:
    finding = found(second(gpus=(), driver="", granted_gpus=granted), "GPUs")
    assert words in finding.seen
    assert advice in finding.advice


def test_a_node_without_the_home_says_so_in_the_output() -> None:
    """The other node has it, and the batch system has written the output there."""
    output = f"hpcgpu: node2 has no /home/me/.hpcgpu/runs/x: {nodes.NOT_SHARED}, or the doctor has ended"
    finding = found(replace(TRIAL, nodes=TRIAL.nodes[:1], ended="job 7 has ended", output=output), "job")
    assert finding.verdict is Verdict.FAILED
    assert "1 of 2 nodes" in finding.seen
    assert "node2 has no /home/me" in finding.seen
    assert "the home is not shared" in finding.advice


def test_what_the_job_has_shown_is_no_question_any_more() -> None:
    """A file system of no known kind is shared if the nodes have written there; PBS is asked by a submission alone."""
    local = replace(
        LOGIN,
        request=findings.not_looked_at("pbs cannot be asked"),
        home=replace(SHARED, kind="ext4", network=False),
        environment=replace(SHARED, kind="ext4", network=False),
    )
    doubtful = [x.name for x in every(local) if x.verdict is not Verdict.OK]
    assert doubtful == ["job request", "Python's folder", "home"]
    assert {x.verdict for x in every(login.confirmed(local, TRIAL))} == {Verdict.OK}
    one_came = login.confirmed(local, replace(TRIAL, nodes=TRIAL.nodes[:1]))
    assert found(one_came, "home").verdict is Verdict.WARNING


def test_an_address_that_both_nodes_have_says_nothing() -> None:
    """Of a bridge of containers, say."""

    def with_bridge(facts: facts.NodeFacts) -> facts.NodeFacts:
        bridge = replace(facts.links[0], interface="docker0", address="172.17.0.1")
        return replace(facts, links=(*facts.links, cut(bridge)))

    both = replace(TRIAL, nodes=tuple(with_bridge(facts) for facts in TRIAL.nodes))
    assert found(both, "node to node").verdict is Verdict.OK
    one = replace(TRIAL, nodes=(with_bridge(TRIAL.nodes[0]), TRIAL.nodes[1]))
    assert found(one, "node to node").verdict is Verdict.WARNING


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (REFUSED, "--account"),
        ("allocation failure: Invalid partition name specified", "--queue"),
        ("error: invalid partition specified: nosuch", "--queue"),
        ("Requested node configuration is not available", "hpcgpu plan"),
    ],
)
def test_the_batch_systems_words_lead_to_the_option(words: str, advice: str) -> None:
    assert advice in login.refusal_advice("slurm", words)


def test_the_longest_tmpdir_is_that_of_multiprocessing() -> None:
    """The real thing: a listener in a folder of that length, and none in one that is a byte longer."""
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        for more in (0, 1):
            folder = Path(short) / ("x" * (LONGEST_TMPDIR + more - len(short) - 1))
            (folder / "pymp-xxxxxxxx").mkdir(parents=True)
            address = f"{folder}/pymp-xxxxxxxx/listener-xxxxxxxx"
            if more:
                with pytest.raises(OSError, match="too long"):
                    multiprocessing.connection.Listener(address, "AF_UNIX")
            else:
                multiprocessing.connection.Listener(address, "AF_UNIX").close()


@pytest.mark.parametrize(("module", "table"), [(login, LOGIN_CHECKS), (nodes, JOB_CHECKS)])
def test_every_check_is_in_a_table(module: ModuleType, table: tuple[Any, ...]) -> None:
    functions = inspect.getmembers(module, inspect.isfunction)
    own = {f for name, f in functions if name.startswith("check_") and f.__module__ == module.__name__}
    assert own
    assert own <= {look for check in table for look in getattr(check.look, "args", (check.look,))}


def test_the_page_lists_every_check_in_its_order() -> None:
    text = (ROOT / "docs" / "explanation" / "doctor.md").read_text()
    rows = re.findall(r"^\| ([^|]+?) \|.*\|$", text.partition("## Faults")[0], re.M)
    listed = [row for row in rows if row != "check" and not row.startswith("-")]
    assert listed == [check.name for check in (*LOGIN_CHECKS, *JOB_CHECKS)]
