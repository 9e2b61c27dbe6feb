"""The doctor's checks of a short job, its nodes and the network: one function each, and their table."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial

from hpcgpu.model import Hop, Nic
from hpcgpu.model.allocation import Limits
from hpcgpu.plan.binding.workers import UCX_WITH_IB, without_infiniband
from hpcgpu.plan.doctor.facts import Folder, Launcher, Link, NodeFacts, Python, TrialFacts, Ucx
from hpcgpu.plan.doctor.findings import Check, CheckResult, each, failed, not_looked_at, ok, warning, worst
from hpcgpu.plan.doctor.login import IMPORTANT, check_limits, check_locked_memory, judge_size
from hpcgpu.units import format_bytes

RDMA = ("infiniband", "roce", "opa", "slingshot", "efa")
_SLOW_LINK_S = 0.05
_MOST_LINKS = 4
_CLOCK_S, _CERTIFICATE_S = 1.0, 86400.0  # certificates are valid from a day before they are made
# Python's multiprocessing puts its sockets into TMPDIR as /pymp-xxxxxxxx/listener-xxxxxxxx, and the kernel takes names
# of 107 bytes (unix(7)).
LONGEST_TMPDIR = 107 - len("/pymp-xxxxxxxx/listener-xxxxxxxx")
_SLOW_IMPORT_S = 10.0
NOT_SHARED = "the home is not shared with the nodes"  # the message of a node without the trial's folder
_SLOW_SCRATCH, _SCRATCH_BYTES = 100e6, 10 << 30


def check_links(facts: TrialFacts) -> CheckResult:
    """Check that the nodes reach each other, at each address."""
    links = [link for node in facts.nodes for link in node.links]
    if len(facts.nodes) < 2:
        return not_looked_at("one node only")
    if not links:
        return failed(
            "the nodes have not found each other's addresses",
            "the folder of the run is slow to show new files: look at the home's file system",
        )
    return _check_ways(links, "between nodes")


def check_login_links(links: Sequence[Link]) -> CheckResult:
    """Check that this machine, on which a cluster object lives, reaches the nodes."""
    result = _check_ways(links, "from here to the nodes")
    if any(not link.error for link in links):
        return result
    return warning(
        result.seen,
        "a cluster object here connects through the batch system instead (a tunnel by srun or ssh), which is "
        "slower: run scripts in the job (hpcgpu plan --script), or ask the administrators to open the nodes' ports",
    )


def check_clock(facts: TrialFacts) -> CheckResult:
    """Check that all machines have the same time."""
    links = [*(facts.links or ()), *(link for node in facts.nodes for link in node.links)]
    answered = [link for link in links if not link.error]
    if not answered:
        return not_looked_at("no machine could reach another")
    off = max(answered, key=lambda link: abs(link.clock_s))
    if abs(off.clock_s) <= _CLOCK_S:
        return ok("all machines have the same time")
    order = "ahead of" if off.clock_s > 0 else "behind"
    summary = f"the clock of {off.target} is {abs(off.clock_s):.1f} s {order} that of {off.source}"
    if abs(off.clock_s) > _CERTIFICATE_S:
        return failed(summary, "certificates made here are not valid there: have the clocks set (chronyd, ntpd)")
    return warning(summary, "times in logs and on the dashboard do not fit: have the clocks set (chronyd, ntpd)")


def _check_ways(links: Sequence[Link], where: str) -> CheckResult:
    """Check connections: one open way between two machines is enough."""
    open_ = [link for link in links if not link.error]
    pairs = {(link.source, link.target) for link in open_}
    if cut := [link for link in links if (link.source, link.target) not in pairs]:
        return failed(
            _describe(cut),
            "a firewall between them closes the ports: ask the administrators to open TCP ports above 1024 between "
            "nodes, or name an interface that they leave open by --interface",
        )
    # Several machines have one address, as bridges of containers do: it leads to no other machine.
    local = {k.address for k in links if any(k.address == o.address and k.target != o.target for o in links)}
    dead = [link for link in links if link.error and link.address not in local]
    if dead:
        good = sorted({link.interface for link in links} - {link.interface for link in dead})
        named = f"name one that works: --interface {good[0]}" if good else "have the administrators look at them"
        return warning(_describe(dead), f"connections by these interfaces cost time before another is taken: {named}")
    slowest = max(open_, key=lambda link: link.took_s)
    text = f"{len(open_)} connections {where} work, the slowest in {slowest.took_s * 1e3:.1f} ms"
    if slowest.took_s > _SLOW_LINK_S:
        return warning(f"{text} ({slowest.address})", "the network is slow or busy: try another by --interface")
    return ok(f"{text} ({', '.join(sorted({link.interface for link in open_}))})")


def _describe(links: Sequence[Link]) -> str:
    return "; ".join(f"{k.source} to {k.target} at {k.address} ({k.interface}): {k.error}" for k in links[:_MOST_LINKS])


def check_nics(_: TrialFacts, node: NodeFacts, nics: Sequence[Nic]) -> CheckResult:
    """Check that the network ports are alive: an unused port may be dead, a port that a GPU would use may not."""
    ports = [nic for nic in nics if not nic.virtual]
    fast = [nic for nic in ports if nic.kind in RDMA] or ports
    alive = [f"{nic.name}:{nic.port}" for nic in fast if nic.active]
    dead = ", ".join(f"{nic.name}:{nic.port} ({nic.kind}) is {nic.state}" for nic in fast if not nic.active)
    if not dead:
        return ok(", ".join(alive)) if alive else not_looked_at("no network card is seen")
    lost = {nic.pci for nic in fast if not nic.active} - {nic.pci for nic in fast if nic.active}
    near = sorted({gpu for gpu, pci, *_ in _nearest(node) if pci in lost})
    summary = f"{dead}, nearest to the GPU at {', '.join(near)}" if near else dead
    if alive and not near:
        return ok(f"{', '.join(alive)}; no GPU misses the others: {summary}")
    left = f"workers take the next ports ({', '.join(alive)})" if alive else "no fast port is left"
    return warning(
        summary,
        f"{left}, as hpcgpu topo shows; variables of your own (UCX_NET_DEVICES, NCCL_IB_HCA) must not name the dead "
        "ones; tell the administrators",
    )


def _nearest(node: NodeFacts) -> list[Hop]:
    """Return the PCI paths of each GPU to its nearest ports."""

    def length(hop: Hop) -> tuple[int, int]:
        return (-hop.depth, hop.bridges)

    least = {gpu: min(length(hop) for hop in node.hops if hop.gpu == gpu) for gpu in {hop.gpu for hop in node.hops}}
    return [hop for hop in node.hops if length(hop) == least[hop.gpu]]


def check_ucx(facts: TrialFacts, node: NodeFacts, ucx: Ucx) -> CheckResult:
    """Check that the workers' UCX has a transport for the network."""
    summary = f"UCX {ucx.version}{f' in {ucx.folder}' if ucx.folder else ''}: {', '.join(ucx.transports)}"
    fast = any(name.startswith(("rc", "dc", "ud", "srd")) for name in ucx.transports)
    if fast or not any(nic.kind in ("infiniband", "roce") and nic.active for nic in node.nics or ()):
        return ok(summary)
    if not ucx.has_ib:
        return warning(summary, f"{without_infiniband(ucx.folder)}. {UCX_WITH_IB}; --protocol tls does without")
    advice = "UCX sees no InfiniBand: install rdma-core on the nodes, or a UCX that was built with it"
    if facts.protocol == "ucx":
        return failed(summary, f"{advice}; --protocol tls does without")
    return warning(summary, advice)


def check_job(facts: TrialFacts) -> CheckResult:
    """Check that the job ran on all of its nodes."""
    if len(facts.nodes) >= facts.requested_nodes:
        return ok(f"job {facts.job_id} ran on {', '.join(node.host for node in facts.nodes)}")
    output = f". Its output ends with: {facts.output}" if facts.output else "; its output is not here either"
    advice = (
        "the home is not shared with the nodes: start from a folder that all nodes have, with HOME in it, or ask the "
        "administrators why the nodes do not mount it"
    )
    if facts.output and NOT_SHARED not in facts.output:
        advice = (
            "its output says why; where it names no such program or module, the nodes lack the Python of this "
            "machine: install it in a shared folder, or give --python"
        )
    written = f"{len(facts.nodes)} of {facts.requested_nodes} nodes have written into {facts.folder}"
    return failed(f"{written}; {facts.ended}{output}", advice)


def check_versions(facts: TrialFacts) -> CheckResult:
    """Check that Python and packages are the same on all machines, and work there."""
    for node in facts.nodes:
        if node.python.broken:
            return failed(
                f"{node.host}: {node.python.path}: {node.python.broken}",
                "install Python and packages for the nodes' CPU, in a job on one of them, and name it by --python",
            )
    differing = [text for node in facts.nodes for text in _differences(facts.python, node)]
    if differing:
        return failed(
            "; ".join(differing),
            "let the nodes have the packages of this machine: one environment in a shared folder, with no module "
            "load or activation in ~/.bashrc that replaces it; --python names it",
        )
    slowest = max(facts.nodes, key=lambda node: node.python.import_s)
    if slowest.python.import_s > _SLOW_IMPORT_S:
        return warning(
            f"{slowest.host}: importing distributed takes {slowest.python.import_s:.0f} s or more",
            "the file system of the Python environment is slow, and each start waits for it: put the environment into "
            "an image (Apptainer, pyxis) or onto a disk of the nodes, and name it by --python",
        )
    return ok(", ".join(f"{name} {facts.python.packages.get(name, 'not there')}" for name in IMPORTANT))


def _differences(here: Python, node: NodeFacts) -> list[str]:
    theirs = node.python
    pairs = [("Python", here.version, theirs.version), ("CPU", here.machine, theirs.machine)]
    names = sorted({*here.packages, *theirs.packages})
    pairs += [(name, here.packages.get(name, "missing"), theirs.packages.get(name, "missing")) for name in names]
    return [f"{name} is {a} here and {b} on {node.host}" for name, a, b in pairs if a != b]


def check_gpus(facts: TrialFacts) -> CheckResult:
    """Check that each node has the requested GPUs."""
    if not facts.requested_gpus:
        return not_looked_at("no GPU was asked for, or simulated ones")
    poor = [node for node in facts.nodes if len(node.gpus) < facts.requested_gpus]
    if not poor:
        first = facts.nodes[0]
        if modes := {mode: node.host for node in facts.nodes for mode in node.compute_modes if mode}:
            return warning(
                "; ".join(f"{host} has GPUs in compute mode {mode}" for mode, host in modes.items()),
                "no other process can use a worker's GPU: make arrays in tasks, since the scheduler opens a GPU for an "
                "array in submit, and leave workers_per_gpu at 1; or start NVIDIA's MPS in the job",
            )
        return ok(f"{len(first.gpus)} on each node: {first.gpus[0]}, driver {first.driver or 'unknown'}")
    parts = [
        f"{node.host} shows {len(node.gpus)} of {facts.requested_gpus} GPUs"
        + (f" (granted: {node.granted_gpus})" if node.granted_gpus is not None else "")
        for node in poor
    ]
    if silent := next((node.no_driver or "no driver answers" for node in poor if not node.driver), ""):
        advice = (
            "the job is on nodes without GPUs, or none was granted: give the queue of the GPU nodes (--queue), and "
            "see in hpcgpu plan how they are asked for (the site's gpus: gpus-per-node, gres or none)"
        )
        if any(node.granted_gpus for node in poor):
            advice = (
                "the GPUs were granted, and the node's NVIDIA driver does not answer: run nvidia-smi in such a job; in "
                "a container let it have the GPUs (apptainer --nv); tell the administrators, or leave the node out"
            )
        return failed("; ".join([*parts, silent]), advice)
    return failed(
        "; ".join(parts),
        "the batch system granted fewer: see in hpcgpu plan how they are asked for, and take away a --gres or "
        "--gpus of your own in --job-extra-directives",
    )


def check_drivers(facts: TrialFacts) -> CheckResult:
    """Check that all nodes have one driver version."""
    drivers = {node.host: node.driver for node in facts.nodes if node.driver}
    if not drivers:
        return not_looked_at("no NVIDIA driver there")
    versions = ", ".join(f"{host}: {version}" for host, version in drivers.items())
    if len(set(drivers.values())) > 1:
        return warning(versions, "libraries may work on some nodes only: tell the administrators, or leave a node out")
    return ok(f"{next(iter(drivers.values()))} on each node")


def check_nvlink(facts: TrialFacts) -> CheckResult:
    """Check that nodes that NVLink joins may use it, and that the job has nodes of one such domain."""
    nodes = [node for node in facts.nodes if node.nvlink_domain]
    if not nodes:
        return ok("no NVLink leads from node to node")
    if closed := [node.host for node in nodes if not node.imex_channel]:
        return warning(
            f"{', '.join(closed)}: NVLink leads to other nodes, but no IMEX channel can be opened",
            "NCCL and UCX take the network between nodes: ask the administrators for NVIDIA's IMEX service and a "
            "channel in each job (Slurm: switch/nvidia_imex); a container needs /dev/nvidia-caps-imex-channels",
        )
    domains = [[node.host for node in nodes if node.nvlink_domain == one] for one in {n.nvlink_domain for n in nodes}]
    summary = "; ".join(sorted(", ".join(hosts) for hosts in domains))
    if len(domains) > 1:
        return warning(
            f"the nodes are of {len(domains)} NVLink domains: {summary}",
            "between these NCCL and UCX take the network: keep nodes together, --job-extra-directives --segment=NODES",
        )
    return ok(f"one domain with IMEX: {summary}")


def check_cpus(facts: TrialFacts, node: NodeFacts, cpus: int) -> CheckResult:
    """Check that the job's processes have enough cores."""
    summary = f"{cpus} of {node.cores} CPUs, {format_bytes(node.memory_bytes)} of memory"
    if max(facts.requested_gpus, 1) < cpus or cpus >= node.cores:
        return ok(summary)
    return warning(
        summary,
        "the job was granted so few cores that copies, spilling and tasks wait for each other: ask for more by "
        "--cores-per-gpu",
    )


def check_node_limits(facts: TrialFacts, _: NodeFacts, limits: Limits) -> CheckResult:
    """Check the job's limits, for the whole cluster: its scheduler may be on any node."""
    size = [judge_size(facts.size, limits, is_certain=True)] if facts.size else []
    return worst([check_limits(limits), *size])


def check_node_locked_memory(facts: TrialFacts, node: NodeFacts, limits: Limits) -> CheckResult:
    """Check how much memory may be locked in the job, if a network card registers memory."""
    if any(nic.kind in RDMA for nic in node.nics or ()):
        return check_locked_memory(limits, needed=facts.protocol == "ucx")
    return ok("no network card there registers memory")


def check_launcher(launcher: Launcher) -> CheckResult:
    """Check that launcher and MPI library fit: the ranks were started and must have met in one world."""
    advice = (
        "load the MPI module with which mpi4py was built (--job-script-prologue 'module load ...'), build mpi4py "
        "by the site's MPI, take the launcher of that MPI (--launcher), or do without MPI: --rendezvous file"
    )
    if launcher.error:
        return failed(launcher.error, advice)
    if launcher.exit_code is None:
        return ok(launcher.command or "one process for all workers, without a launcher")
    library = f" of {launcher.library}" if launcher.library else ""
    if launcher.worlds and set(launcher.worlds) != {len(launcher.worlds)}:
        apart = f"that did not meet in one MPI world, but in worlds of {', '.join(map(str, launcher.worlds))}"
        return failed(f"{launcher.command} started {len(launcher.worlds)} ranks{library} {apart}", advice)
    if launcher.exit_code or not launcher.worlds:
        ranks = "" if launcher.worlds else "started no rank that told of its MPI world, and "
        output = f": {launcher.output}" if launcher.output else ""
        return failed(f"{launcher.command} {ranks}ended with exit code {launcher.exit_code}{output}", advice)
    command = re.sub(r" -x \S+| env( \S+=\S+)+$", "", launcher.command)  # without the variables that it passes on
    return ok(f"{command}: {len(launcher.worlds)} ranks{library} met")


def check_temporary(_: TrialFacts, __: NodeFacts, temporary: str) -> CheckResult:
    """Check that TMPDIR leaves room for the names of sockets."""
    size = len(temporary.encode(errors="surrogateescape"))
    if size <= LONGEST_TMPDIR:
        return ok(f"{temporary}, short enough for sockets")
    return warning(
        f"TMPDIR has {size} bytes, {temporary}",
        "names of Unix sockets have 107 bytes at most. hpcgpu takes any TMPDIR, multiprocessing in tasks one of "
        f"{LONGEST_TMPDIR}: give a short one, --job-script-prologue 'export TMPDIR=/tmp'",
    )


def check_copies(facts: TrialFacts) -> CheckResult:
    """Check that the processes of a node can copy large values from each other's memory."""
    advice = (
        "large values go through the encrypted connection there: ask the administrators whether processes of one user "
        "may read each other's memory (process_vm_readv)"
    )
    obstacles = [f"{node.host}: {node.copy_obstacle}" for node in facts.nodes if node.copy_obstacle]
    return warning("; ".join(obstacles), advice) if obstacles else ok("one copy by the kernel")


def check_node_scratch(_: TrialFacts, __: NodeFacts, folder: Folder) -> CheckResult:
    """Check that the folder for spilling has room and is fast."""
    if folder.error:
        return failed(
            f"{folder.path}: {folder.error}",
            "give a folder on a disk of the nodes that can be written, and has room: --local-directory",
        )
    speed = f", {format_bytes(int(folder.bytes_per_s))}/s" if folder.bytes_per_s else ""
    summary = f"{folder.path} ({folder.kind}), {format_bytes(folder.free_bytes)} free{speed}"
    give = "give a folder on a disk of the nodes"
    if 0 <= folder.free_bytes < 1 << 20:
        return failed(f"{summary}: it is full", f"{give} with more room: --local-directory")
    if 0 <= folder.free_bytes < _SCRATCH_BYTES:
        return warning(summary, f"{give} with more room: --local-directory")
    if folder.memory:
        return warning(summary, f"it lies in memory, which spilling is to free: {give}: --local-directory")
    if 0 < folder.bytes_per_s < _SLOW_SCRATCH:
        return warning(summary, f"spilling is as slow as that: {give}: --local-directory")
    return ok(summary)


JOB_CHECKS: tuple[Check, ...] = (
    Check("job", "", check_job),
    Check("versions", "", check_versions),
    Check("node to node", "", check_links),
    Check("here to nodes", "links", check_login_links),
    Check("clocks", "", check_clock),
    Check("GPUs", "", check_gpus),
    Check("GPU drivers", "", check_drivers),
    Check("NVLink of nodes", "", check_nvlink),
    Check("CPUs", "", partial(each, "cpus", check_cpus)),
    Check("limits in the job", "", partial(each, "limits", check_node_limits)),
    Check("locked memory in the job", "", partial(each, "limits", check_node_locked_memory)),
    Check("values within a node", "", check_copies),
    Check("network ports", "", partial(each, "nics", check_nics)),
    Check("UCX", "", partial(each, "ucx", check_ucx)),
    Check("launcher and MPI", "launcher", check_launcher),
    Check("socket paths", "", partial(each, "temporary", check_temporary)),
    Check("scratch of the nodes", "", partial(each, "scratch", check_node_scratch)),
)


def checks_for(facts: TrialFacts) -> tuple[Check, ...]:
    """Return the checks that have facts: without an answer of a node, the job's alone."""
    return JOB_CHECKS if facts.nodes else JOB_CHECKS[:1]
