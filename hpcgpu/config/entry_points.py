"""The entry points, and the options that have no effect at each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hpcgpu.errors import ConfigError, opt
from hpcgpu.model.settings import BY_NAME, GROUPS, Settings, user_name

REQUEST = ("nodes", *(name for name in GROUPS["Batch job"] if name != "walltime"))
TIME = ("walltime", "drain", "requeue")
CLIENT = ("shape", "scheduler", "client_grace", "dashboard_port")
START = ("ranks", "launcher", "environment")
_ASKED = (
    "it is asked of a batch system, and {entry_point} asks none; sbatch, salloc and qsub have options for it, and "
    "'hpcgpu plan', SLURMGPUCluster and PBSGPUCluster take it"
)
_OF_A_WORKER = f"; for each worker: {opt('memory_limit', None)}"
_REQUEST = {
    **dict.fromkeys(REQUEST, _ASKED),
    "nodes": "{entry_point} has the nodes on which it is started; salloc -N, sbatch -N or qsub -l select= asks for "
    "them, and 'hpcgpu plan', SLURMGPUCluster or PBSGPUCluster takes it",
    "memory": _ASKED + _OF_A_WORKER,
}
_TIME = dict.fromkeys(TIME, "{entry_point} in no job has no time limit; 'hpcgpu plan' and the classes take it")
_CLIENT = dict.fromkeys(
    CLIENT, "{entry_point} is for a cluster inside its job, with its script; SLURMGPUCluster and PBSGPUCluster take it"
)
_START = dict.fromkeys(START, "{entry_point} is one rank, and starts no others; 'hpcgpu launch' takes it")
_PYTHON = "its ranks have the Python that runs the script; start the script by another, or take 'hpcgpu run'"
_HERE = "this cluster is the GPUs of one machine; leave it out, or take a class of a batch system"
_ALSO_HERE = ("job_name", "log_directory", "client_grace", "dashboard_port")
RUN, LAUNCH, JOBSCRIPT, RUNNER, LOCAL = ENTRY_POINTS = (
    *("hpcgpu run", "hpcgpu launch", "hpcgpu plan with a script"),
    *("GPURunner", "LocalGPUCluster"),
)
_UNUSED: Mapping[str, Mapping[str, str]] = {
    RUN: {**_REQUEST, **_CLIENT, **_START},
    LAUNCH: {**_REQUEST, **_CLIENT},
    JOBSCRIPT: _CLIENT,
    RUNNER: {**_REQUEST, **_CLIENT, **_START, "python": _PYTHON},
    LOCAL: {
        **{n: _HERE for n in (*REQUEST, *TIME, *CLIENT) if n not in _ALSO_HERE},
        "memory": _HERE + _OF_A_WORKER,
        "environment": _HERE,
    },
}


def unused(entry_point: str, *, in_job: bool = True) -> Mapping[str, str]:
    """Return the options, by user name, without an effect at an entry point, each with advice; {}: another one."""
    if entry_point not in ENTRY_POINTS:
        return {}
    return {**_UNUSED[entry_point], **({} if in_job or entry_point == JOBSCRIPT else _TIME)}


def check_entry_point(entry_point: str, settings: Settings, names: Iterable[str], *, in_job: bool) -> None:
    """Raise ConfigError, with advice, for given options that differ from their defaults and have no effect here."""
    vain, defaults = unused(entry_point, in_job=in_job), Settings()
    options_ = dict.fromkeys(user_name(option) for name in names if (option := BY_NAME.get(name)))
    wrong = [
        f"{settings.opt(name)}: {vain[name].format(entry_point=entry_point)}"
        for name in options_
        if name in vain and getattr(settings, BY_NAME[name].name) != getattr(defaults, BY_NAME[name].name)
    ]
    if wrong:
        raise ConfigError("\n".join(wrong))
