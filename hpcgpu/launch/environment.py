"""Variables of launchers and batch systems: a rank, its launch and its job; and those that others must not have.

Pure. Recorded from srun of Slurm 22.05.8, mpirun and mpiexec of Open MPI 4.1.4 and 5.0.11, and MPICH 5.0.2; PALS as
documented in mpiexec(1).

Together: a variable that describes a rank is one that its children must not have.
"""

from __future__ import annotations

from collections.abc import Mapping

from hpcgpu.model.allocation import (
    JOB_END,
    JOB_MEMORY,
    JOB_NODES,
    JOB_RESTARTS,
    SCRIPT_ADDRESS,
    SCRIPT_ENV,
    TASK,
    Allocation,
    CpuSet,
    HostMemory,
    RankFacts,
)

# (launcher, rank, size, local rank, local size). The order matters: under mpirun inside a Slurm job the SLURM_*
# variables are set too, but belong to mpirun's own daemon (rank 1 of 4 had SLURM_PROCID=0). Under srun --mpi=pmi2 those
# of PMI are set, too, but not MPI_LOCALRANKID.
_LAUNCHERS = (
    ("Open MPI mpirun", *(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
    ("PALS mpiexec", "PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PMI_LOCAL_SIZE"),
    ("MPICH mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # and Intel MPI's
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""),
    ("pbs_tmrsh", *TASK, "", ""),
)

# Launchers whose ranks are no ranks of ours, but are bound like any (read_local_rank): they start programs that run in
# those above. torchrun's names are also set by hand, for PyTorch's env://, so the id of its run must be there.
_OTHER_LAUNCHERS = (
    ("torchrun", "TORCHELASTIC_RUN_ID", *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")),
    ("Flux", "FLUX_TASK_LOCAL_ID", *("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", "")),
)

# Variables that identify a launch: a job may start ranks twice. MPICH's mpiexec has none. PALS: as in Slurm's
# cray_shasta plugin, which replaces it.
_LAUNCH_VARIABLES = {
    "Open MPI mpirun": ("PMIX_NAMESPACE",),
    "PALS mpiexec": ("PALS_APID",),
    "srun": ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
}
# A variable in MiB, the option that sets it, and the variable with the count that it is multiplied by. At most one is
# set ("mutually exclusive", srun(1)), none by --mem=0, all of the node; a step's own option has precedence (22.05.8).
_SLURM_MEMORY = (
    ("SLURM_MEM_PER_NODE", "--mem", ""),
    ("SLURM_MEM_PER_CPU", "--mem-per-cpu", "SLURM_CPUS_ON_NODE"),
    ("SLURM_MEM_PER_GPU", "--mem-per-gpu", "SLURM_GPUS_ON_NODE"),
)
# sbatch --export sets them for each srun of its job, which would leave PATH out, and the run document.
EXPORTS = ("SLURM_EXPORT_ENV", "SRUN_EXPORT_ENV")
_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_LAUNCHER_PREFIXES = ("OMPI_", "PRTE_", "PMIX_", "PMI_", "HYDRA_", "PALS_", "PBS_", "HPCGPU_TASK_", "BASH_FUNC_")
# GPUs by numbers or UUIDs, which PBS's hooks set in each task for its node.
_DEVICE_VARIABLES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
_NUMBERS = r"-1|[\w,.:]*"
# A process reads its job and rank from these (read_allocation, read_rank). Processes that should not know of a job
# must not have them; users' settings for their MPI (OMPI_MCA_*) stay.
JOB_PREFIXES = ("SLURM_", "PBS_", "OMPI_COMM_", "PMI", "PALS_", "HPCGPU_TASK_")
# No launcher gets these. The user's other hosts, to which an mpirun without a list of hosts would send the ranks. All
# flags of ours rank above other variables: for binding, mapping, ranks on a node (Open MPI 5.0.11, MPICH 5.0.2, Intel
# MPI 2021.19). The job's tasks per node, without the scheduler's rank: srun would warn in each log "can't honor
# --ntasks-per-node set to 4 which doesn't match the requested tasks 9". As an option it would be the quotient, rounded
# down for 22.05.8, and up for 24.11.5. The job's GPUs for each task: the scheduler's rank has none, one rank of a node
# would have one alone; and with tasks for each GPU srun starts as many, whatever --ntasks says (26.05.5).
WITHHELD = (
    *("PRTE_MCA_prte_default_hostfile", "OMPI_MCA_orte_default_hostfile"),
    *("HYDRA_HOST_FILE", "I_MPI_HYDRA_HOST_FILE", "SLURM_NTASKS_PER_NODE", "SLURM_NTASKS_PER_GPU"),
    *("SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_GPU_BIND", "SLURM_TRES_BIND"),
)
# Variables that sbatch and srun would take from this job into another (inherited_variables); PBS's are not among them.
_INHERITED_PREFIXES = ("SLURM_", "SLURMD_", "SRUN_", "PMI_", "PMIX_", "PRTE_", "OMPI_", "HYDRA_", "PALS_", "MPI_LOCAL")
_PROCESS_VARIABLES = frozenset(("_", "PWD", "OLDPWD", "SHLVL", "HOSTNAME", "NCPUS"))
# Variables that name the parent of Open MPI 5's session folder, `ompi.PID`, on the node where it is started; the
# default, and the place on other nodes, is the folder of temporary files. A killed mpirun leaves the folder behind, and
# a later one with the same pid cannot start: "The PMIx server's listener thread failed to start", exit code 213. Pids
# repeat, soon in a container that is restarted. So it is put into a folder that is removed however a run ends. Open MPI
# 4's, `ompi.HOST.UID`, can be taken first by another user of any node ("orte_session_dir failed"). So it has a random
# name, one for all nodes, on which its daemons make and remove it (4.1.4); remote_tmpdir_base has no effect.
SESSION_FOLDER = {
    **dict.fromkeys(("openmpi-5", "openmpi-6"), ("PRTE_MCA_prte_local_tmpdir_base", "PRTE_MCA_prte_tmpdir_base")),
    "openmpi-4": (*(f"OMPI_MCA_orte_{name}" for name in ("top_session_dir", "tmpdir_base", "local_tmpdir_base")),),
}


def read_rank(environ: Mapping[str, str]) -> RankFacts:
    """Return rank and size of the process with this environment; rank 0 of 1 if no launcher started it."""
    for launcher, rank, size, local_rank, local_size in _LAUNCHERS:
        if rank not in environ or size not in environ:
            continue
        if launcher == "srun" and "SLURM_STEP_ID" not in environ:
            continue  # the batch script itself: SLURM_PROCID is 0 there, outside of any step
        if launcher == "MPICH mpiexec" and "SLURM_STEP_ID" in environ and local_rank not in environ:
            continue
        return RankFacts(
            rank=int(environ[rank]),
            size=int(environ[size]),
            local_rank=_int(environ, local_rank),
            local_size=_int(environ, local_size),
            launcher=launcher,
            mpi_type=environ.get("SLURM_MPI_TYPE", "") if launcher == "srun" else "",
        )
    return RankFacts()


def read_local_rank(environ: Mapping[str, str]) -> RankFacts:
    """Return the place of this process as the innermost launcher numbers it; local numbers are None if unknown.

    Unlike :func:`read_rank` it knows launchers without an MPI, and the number of ranks on the node where the launcher
    has no variable for it. The numbers of a process that no launcher started are None, too.
    """
    for launcher, mark, *names in _OTHER_LAUNCHERS:
        if mark not in environ or (launcher == "Flux" and "OMPI_COMM_WORLD_RANK" in environ):
            continue  # an mpirun within Flux is nearer to the process
        rank, size, local_rank, local_size = (_int(environ, name) for name in names)
        if rank is not None and size is not None:
            return RankFacts(rank, size, local_rank, local_size or _flux_local_size(size, environ), launcher)
    facts = read_rank(environ)
    if facts.launcher == "srun":
        # 4(x2),3
        counts = (text.rstrip(")").partition("(x") for text in environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(","))
        each = [int(count) for count, _, times in counts if count for _ in range(int(times or 1))]
        node = _int(environ, "SLURM_NODEID")
        return facts._replace(local_size=each[node] if node is not None and node < len(each) else None)
    if facts.launcher == "pbs_tmrsh" and read_allocation(environ).node_count == 1:
        return facts._replace(local_rank=facts.rank, local_size=facts.size)
    return facts


def _flux_local_size(size: int, environ: Mapping[str, str]) -> int | None:
    """Return the ranks of each node if all can have the same number; Flux has no variable for it."""
    nodes = _int(environ, "FLUX_JOB_NNODES")
    return size // nodes if nodes and size % nodes == 0 else None


def read_step_masks(environ: Mapping[str, str]) -> tuple[CpuSet, ...] | None:
    """Return the PUs to which srun bound each of this node's ranks, in Slurm's numbers.

    () if it bound none, None if it did by a rule alone (``--cpu-bind=rank``, ``ldoms``).
    """
    kind, masks = environ.get("SLURM_CPU_BIND_TYPE", ""), environ.get("SLURM_CPU_BIND_LIST", "").split(",")
    if kind.startswith("mask_cpu"):
        return tuple(CpuSet.from_mask(mask) for mask in masks)
    if kind.startswith("map_cpu"):
        return tuple(CpuSet([int(number, 0)]) for number in masks)
    return () if kind in ("", "none") else None


def read_launch(environ: Mapping[str, str]) -> str:
    """Return an identifier of this launch, the same for all of its ranks; "" if the launcher has none."""
    names = _LAUNCH_VARIABLES.get(read_rank(environ).launcher, ())
    return ".".join(environ[name] for name in names if name in environ).replace("/", "_")


def read_allocation(environ: Mapping[str, str], host: str = "") -> Allocation:
    """Return the job around the process with this environment; ``host`` selects this node's memory (PBS)."""
    rank = read_rank(environ)
    array, element = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    if "SLURM_JOB_ID" in environ:
        return Allocation(
            batch="slurm",
            # Slurm's commands do not list the raw ids of an array's elements.
            job_id=f"{array}_{element}" if array and element else environ["SLURM_JOB_ID"],
            restart_count=_int(environ, "SLURM_RESTART_COUNT") or 0,
            node_count=_int(environ, "SLURM_JOB_NUM_NODES") or 1,
            node_name=environ.get("SLURMD_NODENAME", ""),
            gpus_per_node=_int(environ, "SLURM_GPUS_PER_NODE"),
            memory=_slurm_memory(environ),
            rank=rank,
        )
    if "PBS_JOBID" in environ:
        return Allocation(
            batch="pbs",
            job_id=environ["PBS_JOBID"],
            # PBS has no variables for these: the job's script counts restarts, hpcgpu launch counts nodes and asks for
            # memory.
            restart_count=_int(environ, JOB_RESTARTS) or 0,
            node_count=_int(environ, JOB_NODES) or 1,
            memory=_pbs_memory(environ, host),
            rank=rank,
        )
    return Allocation(job_id=environ.get("HPCGPU_JOB_ID", ""), rank=rank)


def _slurm_memory(environ: Mapping[str, str]) -> HostMemory | None:
    """Return the node's memory that this step, or this job, may use, whether or not a cgroup enforces it."""
    for name, option, counted in _SLURM_MEMORY:
        each, count = _int(environ, name), _int(environ, counted) if counted else 1
        if each and count:
            times = f" with {counted}={count}" if counted else ""
            return HostMemory(each * count << 20, f"{option} of the job: {name}={each}{times}")
    return None


def render_memory(granted: Mapping[str, int]) -> str:
    """Return the memory that PBS granted on each host as the text of ``JOB_MEMORY``; "" for none."""
    if len(set(granted.values())) < 2:
        return "".join(map(str, set(granted.values())))
    return ",".join(f"{host}={nbytes}" for host, nbytes in granted.items())


def _pbs_memory(environ: Mapping[str, str], host: str) -> HostMemory | None:
    """Return the granted memory of this host: the least of all values if PBS has another name for it."""
    entries = [word.rpartition("=") for word in environ.get(JOB_MEMORY, "").split(",")]
    granted = {name.partition(".")[0]: int(nbytes) for name, _, nbytes in entries if nbytes.isdigit()}
    nbytes = granted.get(host.partition(".")[0], min(filter(None, granted.values()), default=0))
    return HostMemory(nbytes, f"mem= of PBS job {environ['PBS_JOBID']}") if nbytes else None


def read_end_s(environ: Mapping[str, str]) -> int | None:
    """Return when the time of this job ends, in seconds since the epoch; None: unknown, or no job."""
    end_s = _int(environ, JOB_END) or _int(environ, "SLURM_JOB_END_TIME")  # Slurm 22.05.8 does not set it
    return end_s if environ.keys() & {"PBS_JOBID", "SLURM_JOB_ID"} else None


def is_isolated(environ: Mapping[str, str]) -> bool:
    """Return whether each rank has its own devices: then no rank can start workers for another.

    --gpus-per-task and --gpu-bind give every task its own device cgroup (Slurm 22.05: each step numbers its GPUs from
    0, CUDA_VISIBLE_DEVICES=0 in every rank, on different devices).
    """
    bound = environ.get("SLURMD_TRES_BIND", "").partition("gpu:")[2] or environ.get("SLURM_GPU_BIND", "")
    if bound:  # also if the option was srun's only; then there is no SLURM_GPUS_PER_TASK (22.05.8)
        return not bound.removeprefix("verbose,").startswith("none")
    return bool(environ.get("SLURM_GPUS_PER_TASK"))


def launcher_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what a launcher's process may have of these variables, with the number of all of a Slurm job's GPUs.

    Where a job has requested GPUs for its tasks alone, Slurm gives a step as many for each of its own tasks, also where
    nothing in the environment says so (24.11.5).
    """
    of_job = {name: value for name, value in environ.items() if name not in WITHHELD}
    # --tres-per-task=cpu:2,gres/gpu:a100:1; --gpus-per-task=1 is 1 in 22.05.8, and gres/gpu=1 since 24.11
    tres = [part.replace("=", ":").split(":") for part in environ.get("SLURM_TRES_PER_TASK", "").split(",")]
    each = sum(int(part[-1]) if part[-1].isdecimal() else 1 for part in tres if part[0] == "gres/gpu")
    each = each or _int(environ, "SLURM_GPUS_PER_TASK") or 0
    if each and not environ.keys() & {"SLURM_GPUS", "SLURM_GPUS_PER_NODE"}:
        of_job["SLURM_GPUS"] = str(each * (_int(environ, "SLURM_NTASKS") or 1))
    return of_job


def brought(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of variables that ranks on other nodes need and that no launcher forwards.

    A task of PBS starts with PATH=/bin:/usr/bin and little else (OpenPBS 23.06.06). Variables of one node are not
    forwarded: its GPUs (but see :func:`rank_shell`), the job's folder.
    """
    job = environ.get("PBS_JOBID") or None

    import re

    def is_common(name: str, value: str) -> bool:
        if not re.fullmatch(_NAME, name) or name in _PROCESS_VARIABLES or name.startswith(_LAUNCHER_PREFIXES):
            return False
        if name in _DEVICE_VARIABLES:
            return False
        return not (name == "TMPDIR" and job and job in value)

    return tuple(sorted(name for name, value in environ.items() if is_common(name, value)))


def rank_shell(environ: Mapping[str, str], *, gives_gpus: bool) -> tuple[str, ...]:
    """Return the first words of a rank's command, a shell; it may give it the script's GPUs if its task has none.

    A hook may number each node's GPUs for this job (2 on one, 0 on the other); a user's numbers are for all nodes.
    UUIDs are those of the first node.
    """
    import re

    numbers = {n: environ[n] for n in _DEVICE_VARIABLES if re.fullmatch(_NUMBERS, environ.get(n, "no numbers"))}
    exports = (f'export {name}="${{{name}-{value}}}"; ' for name, value in numbers.items())
    line = "".join(exports) if gives_gpus else ""
    # Slurm's warning may come up to 60 s early (sbatch(1), --signal), while Python and the package are being imported.
    # Functions that bash exports, as Lmod's module, are lost in Debian's sh; -p hands them on unread.
    shell = ("bash", "-p") if any(name.startswith("BASH_FUNC_") for name in environ) else ("/bin/sh",)
    return (*shell, "-c", f"trap '' USR1; {line}exec \"$@\"", "sh")


def inherited_variables(environ: Mapping[str, str]) -> frozenset[str]:
    """Return the names of variables that a job submitted from this one must not inherit.

    sbatch hands on all variables, and srun takes some as its options: where the first job has one GPU and the second
    none, "Step requested GRES but job doesn't have GRES" (Slurm 22.05.8). Users' variables for srun cannot be told from
    Slurm's. In a script of a run, the variables of that run's scheduler stay here, too.
    """
    if "SLURM_JOB_ID" not in environ and SCRIPT_ADDRESS not in environ:
        return frozenset()
    launched = {name for name in environ if name.startswith(_INHERITED_PREFIXES) and "_MCA_" not in name}
    ours = {SCRIPT_ENV, JOB_NODES, JOB_RESTARTS, JOB_MEMORY, JOB_END, *environ.get(SCRIPT_ENV, "").split(",")}
    return frozenset((launched | ours) & environ.keys() - {"SLURM_CONF"})


def _int(environ: Mapping[str, str], name: str) -> int | None:
    """Parse a number, also Slurm's ``gpu:4`` and ``4(x2)``."""
    digits = environ.get(name, "").split(":")[-1].split("(")[0]
    return int(digits) if digits.isdigit() else None
