"""The job templates in ``jobscripts/``, rendered by the code that renders every job."""

from __future__ import annotations

from hpcgpu.batch import get
from hpcgpu.model import JobSpec

_COMMON = (
    "# Change what stands above as your site wants it: partition or queue, account, time, nodes, GPUs.",
    "# Python, hpcgpu and an MPI library must be found here: load modules or activate an environment, if need be.",
)


def render(name: str) -> str:
    """Return the text of ``slurm.sbatch``, ``pbs.sh`` or ``mpirun.sh``."""
    system, argv, arguments, usage = _TEMPLATES[name]
    gang = JobSpec(
        name="hpcgpu",
        argv=argv,
        arguments=arguments,
        nodes=2,
        tasks_per_node=4,
        gpus_per_node=4,
        walltime_s=3600,
        prologue=(f"# usage: {usage}", *(_COMMON if system != "local" else ())),
    )
    return get(system).script(gang)


_LAUNCH = ("hpcgpu", "launch")
_TEMPLATES = {
    "slurm.sbatch": (
        "slurm",
        _LAUNCH,
        '"$@"',
        "sbatch jobscripts/slurm.sbatch [options of hpcgpu launch] my_script.py [arguments]",
    ),
    "pbs.sh": (
        "pbs",
        _LAUNCH,
        '"${SCRIPT:?say which: qsub -v SCRIPT=my_script.py jobscripts/pbs.sh}" ${ARGS-}',
        "qsub -v SCRIPT=my_script.py,ARGS='its arguments, split at blanks' jobscripts/pbs.sh",
    ),
    "mpirun.sh": (
        "local",
        (*_LAUNCH, "--launcher", "mpirun"),
        '"$@"',
        "jobscripts/mpirun.sh [options of hpcgpu launch] my_script.py [arguments], in any allocation",
    ),
}
NAMES = tuple(_TEMPLATES)
