"""The request for a job, from the settings of its user; and what no queue has for it.

Together: shortfalls name the options from which the request has each of its numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from hpcgpu.errors import ConfigError, opt, plain
from hpcgpu.model import JobSpec, Offer, Settings
from hpcgpu.model.allocation import parse_simulated
from hpcgpu.units import format_bytes, format_duration

# Directives for CPUs, or for whole nodes, and for GPUs.
_CPU_DIRECTIVE = r"exclusive|excl\b|cpus|ncpus|-c\b|\bselect="
_GPU_DIRECTIVE = r"--(gres|tres-per-task)=.*gpu|--gpus|-G\b|ngpus="
# Where the number is that of a node, not of a task or of the job.
_OF_NODE = r"(?:--gres=|--gpus-per-node|ngpus=).*?(\d+)$"


def workers_per_node(settings: Settings) -> int:
    """Return the number of workers of each node; raise ConfigError if the number of GPUs is not given."""
    return gpus_per_node(settings) * settings.workers_per_gpu + settings.cpu_workers


def first_workers(settings: Settings) -> int:
    """Return the workers of the job that has the scheduler; 0 if the submitting process has the scheduler."""
    here = settings.shape == "elastic" and settings.scheduler == "here"
    return 0 if here else settings.nodes * workers_per_node(settings)


def plan_request(settings: Settings, argv: tuple[str, ...]) -> JobSpec:
    """Request a gang: one job, one rank per GPU (or per node) and the scheduler's beside them.

    ``settings`` are checked and have a site's number of GPUs; ``argv`` starts the ranks with the run document. Raises
    ConfigError for a missing number of GPUs.
    """
    count = gpus_per_node(settings)
    _check_cores(settings, count)
    tasks = count if count and settings.ranks_per(settings.nodes) == "gpu" else 1
    of_gpus, beside = settings.cores_per_gpu, settings.cpu_workers * settings.nthreads  # cores of the CPU workers
    return JobSpec(
        name=settings.job_name,
        argv=argv,
        nodes=settings.nodes,
        tasks_per_node=tasks,
        cpus_per_task=None if of_gpus is None and count else (of_gpus or 0) * count // tasks + -(-beside // tasks),
        gpus_per_node=0 if settings.gpus else count,
        memory_per_node_bytes=settings.memory_bytes,
        walltime_s=settings.walltime_s,
        warn_s=int(settings.warning_s),
        requeue=settings.requeue,
        queue=settings.queue,
        account=settings.account,
        prologue=settings.job_script_prologue,
        extra_directives=settings.job_extra_directives,
        skipped_directives=settings.job_directives_skip,
        log_directory=settings.log_directory,
    )


def _check_cores(settings: Settings, count: int) -> None:
    """Refuse a number of cores to bind to of which the job would get fewer: dask-jobqueue's cores= requests them."""
    cores, each = settings.cores, settings.cores_per_gpu
    elsewhere = settings.site or any(re.search(_CPU_DIRECTIVE, d) for d in settings.job_extra_directives)
    if not isinstance(cores, int) or (each is None and elsewhere) or not count:
        return
    needed = cores * settings.workers_per_gpu
    if each is None or needed > each:
        has = f"a GPU has {opt('cores_per_gpu', each)}" if each else "no core is requested from the batch system"
        raise ConfigError(
            f"{settings.opt('cores')} binds each worker to {cores} cores, but {has}; to request {cores} cores of a "
            f"node give {opt('cores_per_gpu', max(1, cores // count))} instead; to bind each worker to {cores} cores "
            f"give {opt('cores_per_gpu', needed)} too"
        )


def gpus_per_node(settings: Settings) -> int:
    """Return the GPUs of each node; simulated ones are not requested of the batch system."""
    if settings.gpus:
        return parse_simulated(settings.gpus).per_node
    if (count := settings.gpus_per_node) is None:
        gres = next((d for d in settings.job_extra_directives if re.search(_GPU_DIRECTIVE, d)), "")
        if gres:
            number = re.search(_OF_NODE, gres)
            raise ConfigError(
                f"instead of {gres} (set by {settings.where('job_extra_directives')}) give "
                f"{opt('gpus_per_node', int(number[1]) if number else 4)}: the number of workers follows from it"
            )
        raise ConfigError(
            f"the number of GPUs of each node is not given: add {opt('gpus_per_node', 4)}, or {opt('site')} for "
            f"a known machine, or {opt('gpus', 'sim:4')} to try without GPUs"
        )
    return count


def shortfalls(spec: JobSpec, offers: Sequence[Offer]) -> tuple[str, ...]:
    """Return what the job requests and none of the queues has, in users' option names; () if one may run it."""
    queues = {offer.queue: [o for o in offers if o.queue == offer.queue] for offer in offers}
    return min((tuple(map(plain, _of_queue(spec, kinds))) for kinds in queues.values()), key=len, default=())


def _of_queue(spec: JobSpec, kinds: Sequence[Offer]) -> Iterator[str]:
    queue = f"queue {kinds[0].queue}"
    longest_s, most, nodes = kinds[0].walltime_s, kinds[0].most_nodes, sum(kind.nodes for kind in kinds)
    if spec.walltime_s and longest_s is not None and -(-spec.walltime_s // 60) > longest_s / 60:
        walltime = opt("walltime", format_duration(spec.walltime_s))
        yield f"{walltime}, but {queue} has a limit of {format_duration(longest_s)}"
    if most is not None and spec.nodes > most:
        yield f"{opt('nodes', spec.nodes)}, but {queue} gives a job {most} at most"
    elif spec.nodes > nodes:
        yield f"{opt('nodes', spec.nodes)}, but {queue} has {nodes}"
    too_much = list(_of_each_node(spec, kinds, queue))
    yield from too_much
    fits = sum(kind.nodes for kind in kinds if not any(_of_each_node(spec, [kind], queue)))
    if not too_much and fits < spec.nodes <= nodes:
        fitting = f"only {fits} of the {nodes} nodes of {queue} have the requested resources"
        yield f"{opt('nodes', spec.nodes)}, but {fitting}"


def _of_each_node(spec: JobSpec, kinds: Sequence[Offer], queue: str) -> Iterator[str]:
    gpus = _most([kind.gpus for kind in kinds])
    if gpus is not None and spec.gpus_per_node > gpus:
        yield f"{opt('gpus_per_node', spec.gpus_per_node)}, but the nodes of {queue} have {gpus} at most"
    cpus, cores = _most([kind.cpus for kind in kinds]), spec.tasks_per_node * (spec.cpus_per_task or 1)
    if cpus is not None and cores > cpus:
        each = opt("cores_per_gpu")
        yield f"{cores} cores of each node ({each} of each GPU), but the nodes of {queue} have {cpus} at most"
    memory, size = _most([kind.memory_bytes for kind in kinds]), spec.memory_per_node_bytes
    if memory is not None and size is not None and size > memory:
        yield f"{opt('memory', format_bytes(size))}, but the nodes of {queue} have {format_bytes(memory)} at most"


def _most(counts: Sequence[int | None]) -> int | None:
    """Return the largest count; None if one is unknown."""
    known = [count for count in counts if count is not None]
    return max(known) if len(known) == len(counts) else None
