"""Bind a rank of any launcher as a worker of its GPU is bound, then become its command: ``hpcgpu bind``.

Each rank does this alone: ranks of other programs have nothing to meet by. So each needs the cores of the whole job on
its node, and takes its share by its number.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from hpcgpu.errors import BindingError, ConfigError, HpcGpuError
from hpcgpu.host import kernel_binding, log
from hpcgpu.launch.environment import is_isolated, read_allocation, read_local_rank, read_step_masks
from hpcgpu.light_typing import TYPE_CHECKING, NamedTuple
from hpcgpu.model.allocation import CpuSet, RankFacts

if TYPE_CHECKING:
    from hpcgpu.model import Gpu, Topology
    from hpcgpu.plan.binding.ranks import RankPlace

# How each launcher is asked to leave all cores of the job to each rank.
_UNBOUND = {
    "Open MPI mpirun": "mpirun --bind-to none",
    "PALS mpiexec": "mpiexec --cpu-bind none",
    "MPICH mpiexec": "mpiexec -bind-to none, or I_MPI_PIN=0 for Intel MPI",
    "Flux": "flux run -o cpu-affinity=on",
    "srun": "srun --cpu-bind=none",
}
_OR_ANY = "or give --any, with which a command that cannot be bound runs unbound"


class Options(NamedTuple):
    """The options of ``hpcgpu bind``."""

    gpus: str | None = None  # sim:4; None: those of this node that the rank may use
    report: bool = False
    dry_run: bool = False
    unbound: bool = False  # run the command also if it cannot be bound
    all_visible: bool = False


def run(command: Sequence[str], options: Options) -> int:
    """Bind this process and become the command; with ``dry_run`` return 0 after printing what would be set."""
    if not command and not options.dry_run:
        raise ConfigError("hpcgpu bind needs a command after its options: hpcgpu bind -- ./program arguments")
    env, facts = dict(os.environ), read_local_rank(os.environ)
    try:
        place = plan(env, facts, options)
        if options.dry_run:
            print(dry_run(place, facts, env))
            return 0
        kernel_binding.bind(place.binding)
        env |= place.changes(env)
        if options.report:
            log.say(report(place, facts, env))
    except BindingError as e:
        if not options.unbound or options.dry_run:
            raise
        log.say(f"rank {facts.rank} is not bound: {e}")
    log.flush()
    try:
        os.execvpe(command[0], list(command), env)
    except OSError as e:
        raise ConfigError(f"{command[0]} could not be started: {e.strerror}") from e


def plan(environ: Mapping[str, str], facts: RankFacts, options: Options) -> RankPlace:
    """Plan this rank's place; BindingError says what is known, and what to do."""
    job = read_allocation(environ)
    if facts.local_rank is None or facts.local_size is None:
        where = "in no job" if job.batch == "local" else f"in job {job.job_id} of {job.batch}"
        why = f"{facts.launcher} has numbered it {facts.rank} of {facts.size}, but not among those of its node"
        why = "no launcher has started it" if facts.launcher == "none" else why
        raise BindingError(
            f"this process, {where}, has no number among the ranks of its node: {why}. Start it by srun, mpirun, "
            f"flux run or torchrun --no-python, {_OR_ANY}"
        )
    from hpcgpu.host import discover
    from hpcgpu.plan.binding.ranks import plan_rank

    alone = is_isolated(environ) and options.gpus is None  # a rank with devices of its own, as in hpcgpu run
    rank, ranks = (0, 1) if alone else (facts.local_rank, facts.local_size)
    if not alone:
        _take_all_masks(facts, environ)
    topology, host, allowed = discover.topology(), os.uname().nodename, CpuSet(os.sched_getaffinity(0))
    gpus, nodes = _gpus_of(topology, environ, host, options.gpus), kernel_binding.granted_memory_nodes() or None
    try:
        place = plan_rank(topology, gpus, allowed, rank, ranks, nodes, all_visible=options.all_visible)
    except HpcGpuError as e:
        raise BindingError(f"{e}; {_OR_ANY}") from e
    if place.binding.shared_cores and len(topology.cores) >= ranks:
        raise BindingError(
            f"{ranks} ranks on {host} may use PUs {allowed} only, of {len(topology.cores)} cores: some would have no "
            f"core of their own. Ask the batch system for a core per rank at least, {_OR_ANY}"
        )
    return place


def _take_all_masks(facts: RankFacts, environ: Mapping[str, str]) -> None:
    """Undo a launcher's binding of each rank to cores of its own; BindingError if the others' are unknown."""
    # The launcher's daemon, our parent, is bound to the cores of the job; 0 in another pid namespace: this process.
    mine, daemon = CpuSet(os.sched_getaffinity(0)), os.sched_getaffinity(os.getppid())
    masks = read_step_masks(environ) if facts.launcher == "srun" else ()
    if masks and masks[(facts.local_rank or 0) % len(masks)] == mine:  # else Slurm's numbers are not the kernel's
        os.sched_setaffinity(0, mine.union(*masks))
    elif masks != () or (facts.launcher in _UNBOUND.keys() - {"srun"} and mine < daemon):
        raise BindingError(
            f"{facts.launcher} has bound this rank to PUs {mine}, and the cores are divided among all ranks of the "
            f"node: start the ranks unbound ({_UNBOUND[facts.launcher]}), {_OR_ANY}"
        )


def _gpus_of(topology: Topology, environ: Mapping[str, str], host: str, simulated: str | None) -> tuple[Gpu, ...]:
    """Return the GPUs that this process may use, or simulated ones; BindingError without any."""
    if simulated is not None:
        from hpcgpu.model.allocation import parse_simulated
        from hpcgpu.plan.binding.bindings import simulated_gpus

        size = parse_simulated(simulated)
        return simulated_gpus(topology, size.per_node, size.memory_bytes, host)
    from hpcgpu.host import nvml

    facts, devices = nvml.read(), environ.get("CUDA_VISIBLE_DEVICES")
    visible = {g.uuid for g in nvml.visible_gpus(facts.gpus, devices)}
    if gpus := tuple(g for g in topology.gpus if g.uuid in visible) or _amd(topology, environ):
        return gpus
    shown = "" if devices is None else f"; CUDA_VISIBLE_DEVICES={devices!r}"
    raise BindingError(
        f"no GPU can be used on {host} ({facts.trouble or 'NVML shows none'}{shown}): request GPUs from the batch "
        f"system, try simulated ones (--gpus sim:4), {_OR_ANY}"
    )


def _amd(topology: Topology, environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Return AMD's GPUs with their numbers for ROCm, which counts them by PCI address, as ``uuid``."""
    gpus = sorted((g for g in topology.gpus if g.vendor == "amd"), key=lambda g: g.pci)
    numbers = {str(i): gpu._replace(uuid=str(i)) for i, gpu in enumerate(gpus)}
    return tuple(numbers[n] for n in environ.get("ROCR_VISIBLE_DEVICES", ",".join(numbers)).split(",") if n in numbers)


def dry_run(place: RankPlace, facts: RankFacts, environ: Mapping[str, str]) -> str:
    """Return the lines that set this rank's variables in a shell; its cores and memory as comments."""
    import shlex

    binding = place.binding
    memory = f"memory {binding.memory_policy} {binding.memory_nodes}".rstrip()
    lines = [f"export {name}={shlex.quote(value)}" for name, value in place.changes(environ).items()]
    comments = (f"{_named(place, facts)}; PUs {binding.cpuset}; {memory}", *binding.reasons)
    return "\n".join((*(f"# {text}" for text in comments), *lines))


def report(place: RankPlace, facts: RankFacts, environ: Mapping[str, str]) -> str:
    """Return what was done, as the kernel shows it, beside the plan where that is another."""
    actual, binding = kernel_binding.read_binding(), place.binding
    planned = f"{binding.memory_policy} {binding.memory_nodes if binding.memory_policy != 'none' else ''}".rstrip()
    memory = f"{actual.memory_policy or 'unknown'} {actual.memory_nodes}".rstrip()
    pairs = (("PUs", str(actual.cpuset), str(binding.cpuset)), ("memory", memory, planned))
    states = [f"{name} {seen}{'' if seen == plan else f' (planned: {plan})'}" for name, seen, plan in pairs]
    env = [f"{name}={environ[name]}" for name, _ in place.env if name in environ]
    return "; ".join((_named(place, facts), *states, *env, *binding.reasons))


def _named(place: RankPlace, facts: RankFacts) -> str:
    gpus = ", ".join(f"{g.pci} {g.uuid}".rstrip() for g in place.binding.gpus)
    local = f"local rank {facts.local_rank} of {facts.local_size} on {os.uname().nodename}"
    return f"rank {facts.rank} of {facts.size} ({facts.launcher}), {local}: GPU {gpus}"
