"""A site's options for its batch system: the block ``dialect`` of a site file.

None: not given, and the batch system's class has its own default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from hpcgpu.errors import ConfigError
from hpcgpu.model.site_facts import Tags, fact, source

_ARRAY = "the most jobs of one array"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmDialect:
    """For Slurm."""

    gpus: Literal["gpus-per-node", "gres", "gpus", "none"] | None = fact(
        None, "the option for GPUs, `gpus` with those of the whole job; `none`: whole nodes come with theirs"
    )
    gpu_type: str | None = fact(None, "type of the GPU in that request, where the site wants one")
    memory: Literal["mem", "mem-per-cpu", "mem-per-gpu", "none"] | None = fact(
        None, "the option for memory; `none`: it may not be asked for"
    )
    cpus: bool | None = fact(None, "may `--cpus-per-task` be given")
    queue: Literal["partition", "qos"] | None = fact(None, "the option for `queue=`")
    array_limit: int | None = fact(None, f"{_ARRAY} (`MaxArraySize`; 1001 if not given)")
    source: Tags = source()

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class PbsDialect:
    """For PBS, where each node is one chunk of `select` unless `select` says otherwise."""

    gpus: Literal["ngpus", "gpus", "none"] | None = fact(
        None, "the chunk's resource for GPUs; `none`: whole nodes come with theirs"
    )
    gpu_chunks: tuple[str, ...] | None = fact(None, "queues in which a chunk is one GPU, and all are on one node")
    mpiprocs: bool | None = fact(None, "may `mpiprocs` be given")
    cpus: bool | None = fact(None, "may `ncpus` be given")
    memory: Literal["mem", "none"] | None = fact(None, "the resource for memory; `none`: it may not be asked for")
    place: str | None = fact(None, "the value of `-l place=`")
    resources: str | None = fact(None, "resources added to each chunk, such as `system=polaris`")
    account: Literal["-A", "-P"] | None = fact(None, "the option for `account=`")
    array_limit: int | None = fact(None, f"{_ARRAY} (`max_array_size`; 10000 if not given)")
    select: bool | None = fact(
        None,
        "`false`: the site has no `-l select`, and totals of the job are asked for, `-l ngpus=8`, `-l ncpus=96`, "
        "`-l mem=`; `mpiprocs` and `place` do not count then, `resources` are `-l` of their own",
    )
    cpus_multiple_of: int | None = fact(
        None, "the cores of each GPU are a multiple of it: 12 where the rule is `ncpus = 12 x ngpus`"
    )
    direct_output: bool | None = fact(
        None, "`false`: the site refuses `-k doe`, and a job's log is there when the job has ended"
    )
    source: Tags = source()

    def __post_init__(self) -> None:
        _check(self)


DIALECTS: Mapping[str, type[SlurmDialect] | type[PbsDialect]] = MappingProxyType(
    {"slurm": SlurmDialect, "pbs": PbsDialect}
)


def _check(dialect: Any) -> None:  # one of the two
    for name in ("array_limit", "cpus_multiple_of"):
        value = getattr(dialect, name, None)
        if value is not None and value < 1:
            raise ConfigError(f"{name}: {value} is no count; allowed: 1 or more")
