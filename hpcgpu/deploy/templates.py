"""Job templates: every file of ``jobscripts``, rendered from requests by the batch systems' own writers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hpcgpu.batch import get
from hpcgpu.errors import ConfigError
from hpcgpu.host import data
from hpcgpu.model import JobSpec

_LAUNCH = ("hpcgpu", "launch")
_SITE = (
    "# Change what stands above as your site wants it: partition or queue, account, time, nodes, GPUs.",
    "# Python, hpcgpu and an MPI library must be found here: load modules or activate an environment, if need be.",
)
_OFF = "# A line that begins with ## is off: take one # away."
# qsub has no place for arguments
_ARGS = ('read -ra arguments <<< "${ARGS-}"',)
_SCRIPT_ARGS = (': "${SCRIPT:?say which: qsub -v SCRIPT=my_script.py ...}"', *_ARGS)
_SCRIPT = '"$SCRIPT" "${arguments[@]}"'
_IN_IMAGE = "hpcgpu run --rendezvous file"
# Ranks are independent: no MPI, no mask, and a failed one ends no other.
_SRUN = ("srun", "--cpu-bind=none", "--kill-on-bad-exit=0", "--mpi=none")
_OPTIONS = (
    "options=(",
    "    --device-memory-limit 0.8 # of a GPU's memory; above it arrays go to host memory",
    "    --jit-unspill # object by object, each brought back where it is used",
    "    # --memory-limit 100GB # host memory of a worker; its share of the node's if not given",
    "    # --local-directory /scratch/$USER # fast, and of each node: for what no longer fits into host memory",
    "    # --site perlmutter # what is known of a machine: hpcgpu launch --help",
    ")",
)
_CONTAINER = (
    "# The image has Python, hpcgpu and what the script imports. Each node has one rank, with all its GPUs' workers.",
    "# The ranks meet by files: no MPI of the image must fit this machine's.",
)
_JUPYTER = (
    "# The log says how to get at the server. In a notebook: from distributed import Client; client = Client()",
    "# The job ends when the server is shut down.",
)
_SWEEP = ("# One thread for each worker: a GPU has one trial at a time.",)


@dataclass(frozen=True, slots=True)
class Template:
    """A file of ``jobscripts``."""

    about: str  # its purpose, in one line
    usage: str  # how it is submitted
    system: str  # the batch system; local for none
    arguments: str = '"$@"'  # shell text after the command
    lines: tuple[str, ...] = _SITE  # of shell, before the command
    argv: tuple[str, ...] = _LAUNCH
    nodes: int = 2
    ranks: int = 4  # of a node, as the batch system counts
    gpus: int = 4  # of a node
    cores: int | None = None  # of a rank; None: as many as the batch system gives

    def text(self) -> str:
        """Return the file."""
        spec = JobSpec(
            name="hpcgpu",
            argv=self.argv,
            arguments=self.arguments,
            nodes=self.nodes,
            tasks_per_node=self.ranks,
            gpus_per_node=self.gpus,
            cpus_per_task=self.cores,
            walltime_s=3600,
            prologue=(f"# {self.about}", f"# usage: {self.usage}", *self.lines),
        )
        return get(self.system).script(spec)


def _sbatch(name: str, more: str = "[options of hpcgpu launch] my_script.py [arguments]", before: str = "") -> str:
    return f"{before}sbatch [its options] jobscripts/{name} {more}"


def _qsub(name: str, image: str = "", script: str = "my_script.py") -> str:
    # A comma in a value of -v would end it; values of the environment may have one (OpenPBS 23.06.06).
    variables = f"{image}SCRIPT={script} ARGS='its arguments, split at blanks'"
    return f"{variables} qsub [its options] -v {'IMAGE,' if image else ''}SCRIPT,ARGS jobscripts/{name}"


def _run_of_array(index: str, runs: str, submit: str) -> tuple[str, ...]:
    """Return the lines that read the arguments of this element's run."""
    return (
        "# Each element is a run of its own, on its own node. Its arguments are a line of the file, split at blanks.",
        *_SITE,
        f"runs={runs}",
        f"run=${{{index}:?no element of an array; submit it as: {submit}}}",
        'read -ra arguments <<< "$(sed -n "${run}p" "$runs")"',
        '[ "${#arguments[@]}" -gt 0 ] || { echo "line $run of $runs has no arguments for this run" >&2; exit 2; }',
    )


_MPIEXEC = (
    "# A bare mpiexec would tie each rank to one core, and its workers would share that: Open MPI 4, and 5.",
    "export OMPI_MCA_hwloc_base_binding_policy=none PRTE_MCA_hwloc_default_binding_policy=none",
    "# mpiprocs=1 makes it one line for each node.",
    'nodes=$(wc -l < "$PBS_NODEFILE")',
)
_SERVER = '"$@" "$(hpcgpu template --folder)"/notebook_server.py'

TEMPLATES = {
    "slurm.sbatch": Template("A script on the GPUs of two nodes.", _sbatch("slurm.sbatch"), "slurm"),
    "slurm-full.sbatch": Template(
        "The same, with what most sites ask for and most users want.",
        _sbatch("slurm-full.sbatch"),
        "slurm",
        '"${options[@]}" "$@"',
        (
            "# Options given to sbatch win over those here.",
            _OFF,
            "##SBATCH --account=my_project",
            "##SBATCH --partition=gpu",
            "##SBATCH --qos=normal",
            "##SBATCH --constraint=a100",
            "##SBATCH --cpus-per-task=16",
            "##SBATCH --mem=0",
            "##SBATCH --exclusive",
            "##SBATCH --requeue",
            "##SBATCH --mail-type=END,FAIL",
            "",
            "# module load cuda openmpi",
            '# source "$HOME/venvs/dask/bin/activate"',
            "# export OMP_NUM_THREADS=1",
            *_OPTIONS,
        ),
    ),
    "slurm-apptainer.sbatch": Template(
        "A script in an Apptainer image.",
        _sbatch("slurm-apptainer.sbatch", "[options of hpcgpu run] my_script.py [arguments]", "IMAGE=my.sif "),
        "slurm",
        f'apptainer exec --nv "$IMAGE" \\\n    {_IN_IMAGE} "$@"',
        (*_CONTAINER, ': "${IMAGE:?say which: IMAGE=my.sif sbatch ...}"'),
        _SRUN,
        ranks=1,
        cores=4,
    ),
    "slurm-pyxis.sbatch": Template(
        "A script in a container image, where Slurm has NVIDIA's pyxis.",
        _sbatch("slurm-pyxis.sbatch", "[options of hpcgpu run] my_script.py [arguments]", "IMAGE=my.sqsh "),
        "slurm",
        '--container-image="$IMAGE" \\\n    --container-mounts="$HOME:$HOME,$PWD:$PWD" --container-workdir="$PWD" \\\n'
        f'    {_IN_IMAGE} "$@"',
        (*_CONTAINER, ': "${IMAGE:?say which: IMAGE=my.sqsh sbatch ...}"'),
        _SRUN,
        ranks=1,
        cores=4,
    ),
    "slurm-jupyter.sbatch": Template(
        "A Jupyter server beside a cluster.",
        _sbatch("slurm-jupyter.sbatch", "[options of hpcgpu launch]"),
        "slurm",
        _SERVER,
        (*_JUPYTER, *_SITE),
    ),
    "slurm-array.sbatch": Template(
        "Independent runs, each a job of one node.",
        'sbatch --array=1-"$(wc -l < runs.txt)" [more options] jobscripts/slurm-array.sbatch runs.txt '
        "[options of hpcgpu launch] my_script.py",
        "slurm",
        '"${@:2}" "${arguments[@]}"',
        _run_of_array(
            "SLURM_ARRAY_TASK_ID",
            "${1:?say which file has the arguments of the runs, one line each}",
            "sbatch --array=1-4 ...",
        ),
        nodes=1,
    ),
    "slurm-sweep.sbatch": Template(
        "A sweep of hyper-parameters: one cluster, a trial on each GPU.",
        _sbatch("slurm-sweep.sbatch", "examples/sweep.py [its options]"),
        "slurm",
        lines=(*_SWEEP, *_SITE),
        argv=(*_LAUNCH, "--nthreads", "1"),
    ),
    "pbs.sh": Template("A script on the GPUs of two nodes.", _qsub("pbs.sh"), "pbs", _SCRIPT, (*_SITE, *_SCRIPT_ARGS)),
    "pbs-full.sh": Template(
        "The same, with what most sites ask for and most users want.",
        _qsub("pbs-full.sh"),
        "pbs",
        f'"${{options[@]}}" {_SCRIPT}',
        (
            "# Options given to qsub win over those here. Others stand there, too, above the first command:",
            "# #PBS -A my_project, #PBS -q gpu, #PBS -l filesystems=home:scratch, #PBS -m ae",
            "# module load cuda openmpi",
            '# source "$HOME/venvs/dask/bin/activate"',
            "# export OMP_NUM_THREADS=1",
            *_OPTIONS,
            *_SCRIPT_ARGS,
        ),
    ),
    "pbs-apptainer.sh": Template(
        "A script in an Apptainer image.",
        _qsub("pbs-apptainer.sh", image="IMAGE=my.sif "),
        "pbs",
        f'--hostfile "$PBS_NODEFILE" -n "$nodes" apptainer exec --nv "$IMAGE" \\\n    {_IN_IMAGE} {_SCRIPT}',
        (*_CONTAINER, *_MPIEXEC, ': "${IMAGE:?say which: qsub -v IMAGE=my.sif,...}"', *_SCRIPT_ARGS),
        ("mpiexec",),
        ranks=1,
        cores=4,
    ),
    "pbs-jupyter.sh": Template(
        "A Jupyter server beside a cluster.",
        "ARGS='options of hpcgpu launch' qsub [its options] -v ARGS jobscripts/pbs-jupyter.sh",
        "pbs",
        _SERVER.replace("$@", "${arguments[@]}"),
        (*_JUPYTER, *_SITE, *_ARGS),
    ),
    "pbs-array.sh": Template(
        "Independent runs, each a job of one node.",
        "qsub -J 1-4 [more options] -v RUNS=runs.txt,SCRIPT=my_script.py jobscripts/pbs-array.sh",
        "pbs",
        '"${SCRIPT:?say which: qsub -v SCRIPT=my_script.py,...}" "${arguments[@]}"',
        _run_of_array(
            "PBS_ARRAY_INDEX",
            "${RUNS:?say which file has the arguments of the runs, one line each: qsub -v RUNS=runs.txt,...}",
            "qsub -J 1-4 ...",
        ),
        nodes=1,
    ),
    "pbs-sweep.sh": Template(
        "A sweep of hyper-parameters: one cluster, a trial on each GPU.",
        _qsub("pbs-sweep.sh", script="examples/sweep.py"),
        "pbs",
        _SCRIPT,
        (*_SWEEP, *_SITE, *_SCRIPT_ARGS),
        (*_LAUNCH, "--nthreads", "1"),
    ),
    "mpirun.sh": Template(
        "A script in any allocation.",
        "jobscripts/mpirun.sh [options of hpcgpu launch] my_script.py [arguments]",
        "local",
        lines=(),
        argv=(*_LAUNCH, "--launcher", "mpirun"),
    ),
}


def text_of(name: str) -> str:
    """Return the text of a template; raise ConfigError if there is none with that name."""
    if name not in TEMPLATES:
        raise ConfigError(f"there is no template {name!r}; there are: {', '.join(TEMPLATES)}")
    return TEMPLATES[name].text()


def folder() -> Path:
    """Return the folder of the templates and of the programs that they start."""
    return data.folder("jobscripts")


def listed() -> str:
    """Return a line for each template, with its purpose."""
    width = max(len(name) for name in TEMPLATES)
    return "".join(f"{name:{width}}  {template.about}\n" for name, template in TEMPLATES.items())
