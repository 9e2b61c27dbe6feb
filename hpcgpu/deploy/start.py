"""Start ranks from options, for commands, cluster classes and job templates; and a cluster inside a script of ranks.

Each rank of ``srun -n 9 python script.py`` imports this, so nothing here imports distributed.
"""

from __future__ import annotations

import inspect
import os
import secrets
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from hpcgpu import config
from hpcgpu.config import entry_points, keywords
from hpcgpu.config.values import typed
from hpcgpu.deploy import settings as all_settings
from hpcgpu.deploy.settings import Wanted, read
from hpcgpu.errors import LaunchError, SubmitError, plain
from hpcgpu.host import launcher_parent, log, private, process
from hpcgpu.launch import environment, launchers
from hpcgpu.launch.environment import read_allocation
from hpcgpu.launch.launchers import RankCommand
from hpcgpu.model import Allocation, Command, Result, RunDocument, Settings
from hpcgpu.model.allocation import (
    ALL_OF_THE_NODE,
    DOCUMENT,
    JOB_END,
    JOB_MEMORY,
    JOB_NODES,
    JOB_RESTARTS,
    SCRIPT_ADDRESS,
    SCRIPT_DASHBOARD,
    World,
    parse_simulated,
)
from hpcgpu.model.job import TIMED_OUT
from hpcgpu.plan.binding.workers import asks_granted

_QUERY_S = 120.0  # import mpi4py from a busy file system takes a minute
_NAMES = ("mpirun", "mpiexec")
_LIBRARY = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"


def agent_argv(settings: Settings) -> tuple[str, ...]:
    """Return the command of one rank; it imports modules from this folder if only the user can write there."""
    from hpcgpu.host.path_writers import changed_by

    is_shared = bool(changed_by(Path.cwd(), by_new_files=True))
    return process.python_argv("hpcgpu.agent", python=settings.python or "", safe=is_shared)


def run(options: Mapping[str, object], options_from: str, script: tuple[str, ...]) -> None:
    """Become one rank of a run; does not return. Raises ConfigError for a wrong setting."""
    _become_rank(read_rank(options, options_from).settings, script)


def _become_rank(settings: Settings, script: tuple[str, ...]) -> None:
    run = RunDocument(settings=settings, script=script)
    added = {**process.rank_env(os.environ, ld_preload(settings)), DOCUMENT: config.render_document(run)}
    process.execute(agent_argv(run.settings), {**os.environ, **added})


def read_rank(options: Mapping[str, object], options_from: str) -> Wanted:
    """Read the settings of one rank; a number of ``gpus`` is its node's."""
    if str(options.get("gpus", "")).isdecimal():
        options = {"gpus_per_node": options["gpus"], **{name: v for name, v in options.items() if name != "gpus"}}
    return all_settings.read(options, options_from, entry_point=entry_points.RUN)


def launch(options: Mapping[str, object], options_from: str, script: tuple[str, ...]) -> None:
    """Start the ranks of a run in this allocation; does not return.

    Raises ConfigError for a wrong setting, or without allocation and launcher; LaunchError if no launcher fits.
    """
    launch_run(RunDocument(settings=_read(options, options_from).settings, script=script))


def execute_with_rank_env(settings: Settings) -> None:
    """Execute this program again unless it has a rank's variables: some are read before main only."""
    if process.rank_env(os.environ):
        added = process.rank_env(os.environ, ld_preload(settings))
        process.execute((sys.executable, *sys.orig_argv[1:]), {**os.environ, **added})


def ld_preload(settings: Settings) -> str:
    """Return the library to preload for the allocator setting; the first rank reports a missing one."""
    if settings.allocator != "jemalloc":
        return ""
    from hpcgpu.host import host_memory  # brings asyncio, 25 CPU ms, which each rank of srun hpcgpu run would pay

    library = host_memory.find_jemalloc(os.environ)
    if not library and not read_allocation(os.environ).rank.rank:
        log.say(plain(host_memory.NOT_FOUND))
    return library


def launch_line(options: Mapping[str, Any], options_from: str, script: tuple[str, ...]) -> tuple[Wanted, str]:
    """Return the settings, and :func:`launch`'s command line, with ``hpcgpu run`` and its options for each rank."""
    read = _read(options, options_from)
    planned = plan_ranks(run_argv(options, script), read.settings)
    if planned.by_file and read.settings.rendezvous != "file":
        planned = plan_ranks(run_argv({**options, "rendezvous": "file"}, script), read.settings)
    return read, shlex.join([*(f"{name}={value}" for name, value in planned.env), *planned.argv])


def run_argv(options: Mapping[str, Any], script: tuple[str, ...]) -> tuple[str, ...]:
    """Return the words of ``hpcgpu run``."""
    program = Path(sys.executable).with_name("hpcgpu")  # not another environment's that stands first in PATH
    return (str(program), "run", *_typed(options), *(script or ("SCRIPT",)))


def _typed(options: Mapping[str, Any]) -> Iterator[str]:
    """Yield options as they are typed, without those that have no effect in a rank."""
    for name, value in options.items():
        if name not in entry_points.unused(entry_points.RUN):
            yield from typed(name, value)


def nodes_and_gpus(settings: Settings) -> tuple[int, int]:
    """Return the number of this job's nodes, and the GPUs that each is to have."""
    allocation = read_allocation(os.environ)
    hosts = _pbs_hosts(settings, "") if allocation.batch == "pbs" else ()
    return len(hosts) or allocation.node_count, _gpus_per_node(settings, allocation)


def _read(options: Mapping[str, object], options_from: str) -> Wanted:
    """Read the settings of a run in this allocation."""
    read = all_settings.read(options, options_from, entry_point=entry_points.LAUNCH)
    allocation = read_allocation(os.environ)
    launchers.check_allocation(allocation, chosen="launcher" in options)
    return replace(read, settings=all_settings.in_job(read.settings, read.site, allocation.batch))


def local_launch(run: RunDocument) -> RankCommand:
    """Return the command that starts a run's ranks on this machine alone: one process, or mpirun if chosen."""
    run, argv = replace(run, launch=secrets.token_hex(32)), agent_argv(run.settings)
    chosen = replace(run.settings, launcher=run.settings.launcher or "fork")
    launcher = plan_ranks(argv, chosen, allocation=Allocation(), shape=run.shape, document=True)
    return launcher._replace(env=(*launcher.env, (DOCUMENT, config.render_document(run))))


def launch_run(run: RunDocument) -> None:
    """Start the ranks of a run in this allocation; does not return."""
    run = replace(run, launch=secrets.token_hex(32))
    added = process.rank_env(os.environ, ld_preload(run.settings))
    argv, variables = agent_argv(run.settings), tuple(f"{k}={v}" for k, v in added.items())
    if run.settings.environment == "stage" and run.shape != "head":
        from hpcgpu.host.stage import staged  # hashlib, tarfile and others, which other launches need not import

        job = read_allocation(os.environ)
        argv = staged(argv, run.settings, run.launch, sends=job.batch == "slurm" and job.node_count > 1)
    launcher = plan_ranks(argv, run.settings, variables, shape=run.shape, document=True)
    if launcher.by_file:
        run = replace(run, settings=replace(run.settings, rendezvous="file"))
    program = shutil.which(launcher.argv[0]) or launcher.argv[0]
    parent = {process.LAUNCHER: process.mark(os.getpid())}  # the launcher's parent, which ends when it does
    # not the last one: MPICH's mpiexec does not hand on what is the last variable of its own (5.0.2, -genvlist)
    env = {DOCUMENT: config.render_document(run), **os.environ, **parent, **added, **dict(launcher.env)}
    env |= dict.fromkeys(env.keys() & environment.EXPORTS, "ALL")
    env = environment.launcher_environ(env)
    if not launcher.starts_ranks:
        process.execute((program, *launcher.argv[1:]), env)
    path = str(private.make_exit_file(run.folder))
    env[DOCUMENT] = config.render_document(replace(run, exit_file=path))
    if launcher.session:
        from hpcgpu.host import remover  # both are imported here: each rank of srun hpcgpu run would pay
        from hpcgpu.host.scratch import Scratch

        # for the launcher's files; this folder and the exit file's are removed when both processes have ended
        scratch = Scratch.make(run.settings.local_directory, "launch", trusted=run.settings.trust_local_directory)
        os.set_inheritable(scratch.lock, True)  # this process becomes another program, and the launcher has it, too
        session = launcher.within(str(scratch.path), env)
        remover.start(str(scratch.lock_path), str(Path(path).parent), *{*session.values()} - {str(scratch.path)})
        env |= session
    launcher_parent.launch((program, *launcher.argv[1:]), env, path, kills=launcher.kills)


def plan_ranks(
    argv: tuple[str, ...],
    settings: Settings,
    variables: tuple[str, ...] = (),
    allocation: Allocation | None = None,
    shape: str = "",
    *,
    document: bool = False,
) -> RankCommand:
    """Return the launcher's command for ranks, which hands their ``document`` on; raise LaunchError if none fits MPI.

    ``env`` sets each rank's variables, as mpirun forwards none to other nodes.
    """
    if shape == "head":  # a scheduler alone is one process, which needs no launcher
        return RankCommand(argv)
    allocation = allocation or read_allocation(os.environ)
    hosts = _pbs_hosts(settings, shape) if allocation.batch == "pbs" else ()
    if len(hosts) > 1:
        variables = (*variables, f"{JOB_NODES}={len(hosts)}")
    nodes = len(hosts) or allocation.node_count
    per_gpu = settings.ranks_per(nodes) == "gpu"
    world = World(
        nodes=nodes,
        hosts=hosts,
        variables=environment.brought(os.environ) if len(hosts) > 1 else (),
        document=document,
        per_node=_gpus_per_node(settings, allocation) if per_gpu else 1,
        extra=per_gpu and shape != "member",  # a member has its scheduler elsewhere
        as_root=os.getuid() == 0,
    )
    added = (*memory_env(settings, allocation, shape), *end_env(allocation, shape))
    variables = (*(variables if world.nodes > 1 else ()), *(f"{k}={v}" for k, v in added))
    rank_argv = ("env", *variables, *argv) if variables else argv
    if len(hosts) > 1 or (document and allocation.batch != "local"):
        rank_argv = (*environment.rank_shell(os.environ, gives_gpus=len(hosts) > 1), *rank_argv)
    return launchers.plan_launch(rank_argv, settings, allocation, _find(settings, allocation), world)


def end_env(allocation: Allocation, shape: str) -> tuple[tuple[str, str], ...]:
    """Query the end of a job's time where Slurm sets no variable for it (22.05.8); return a variable of ours."""
    if allocation.batch != "slurm" or shape == "member" or "SLURM_JOB_END_TIME" in os.environ:
        return ()
    from hpcgpu.batch import slurm
    from hpcgpu.host import run as programs

    end_s = slurm.read_end_s(programs.run_sync(slurm.ask_end(allocation.job_id)))
    return ((JOB_END, str(end_s)),) if end_s else ()


def memory_env(settings: Settings, allocation: Allocation, shape: str = "") -> tuple[tuple[str, str], ...]:
    """Query memory and time if the batch system sets no variables for them; return variables of ours."""
    if not asks_granted(allocation, shape):
        return ()
    from hpcgpu.batch import pbs  # all are imported here: each rank of srun hpcgpu run would pay
    from hpcgpu.host import host_memory
    from hpcgpu.host import run as programs

    try:
        answer = programs.run_sync(pbs.ask_memory(allocation.job_id))
        granted, end_s = pbs.read_memory(answer), pbs.read_end_s(answer, time.time())
        restarts = 0 if allocation.restart_count else pbs.read_restarts(answer)
    except SubmitError as error:
        if not settings.memory_bytes and host_memory.memory_limit().source == ALL_OF_THE_NODE:
            log.say(f"the job's memory is unknown, so its workers share all memory of their node: {error}")
        return ()
    memory = ((JOB_MEMORY, environment.render_memory(granted)),) if granted else ()
    started = ((JOB_RESTARTS, str(restarts)),) if restarts else ()
    return (*memory, *started, *(((JOB_END, str(end_s)),) if end_s else ()))


def _pbs_hosts(settings: Settings, shape: str) -> tuple[str, ...]:
    """Return the job's nodes, each once, in their order; PBS has no variable that counts them."""
    path = os.environ.get("PBS_NODEFILE")
    hosts = tuple(dict.fromkeys(Path(path).read_text().split())) if path else ()
    if hosts and shape == "gang" and len(hosts) < settings.nodes:
        raise LaunchError(
            f"the request was for {settings.nodes} nodes ({settings.where('nodes')}), but PBS has put this job on "
            f"{len(hosts)} ({', '.join(hosts)}): each chunk needs a node of its own, -l place=scatter. If the job "
            f"asked for that, a hook of the site has changed it: qstat -f {os.environ.get('PBS_JOBID')} shows its place"
        )
    return hosts


def _gpus_per_node(settings: Settings, allocation: Allocation) -> int:
    if settings.gpus_per_node == 0:
        return 1  # a rank, for its workers without a GPU
    simulated = parse_simulated(settings.gpus).per_node if settings.gpus else None
    if promised := settings.gpus_per_node or simulated or allocation.gpus_per_node:
        return promised
    from hpcgpu.host import nvml

    return len(nvml.read().gpus) or 1


def _find(settings: Settings, allocation: Allocation, limit_s: float = _QUERY_S) -> launchers.LauncherFacts:
    """Find the launchers that may be used; LaunchError if one has not answered in ``limit_s``."""
    if settings.launcher == "fork" or (settings.launcher is None and allocation.batch == "local"):
        return launchers.LauncherFacts()
    from hpcgpu.host import run as programs

    def query(*argv: str) -> Result:
        result = programs.run_sync(Command(argv, timeout_s=limit_s))
        if result.returncode == TIMED_OUT:  # no launcher that happens to answer: mpirun would replace a slow srun
            raise LaunchError(
                f"no launcher can be chosen: {shlex.join(argv)} has not answered in {limit_s:g} s. This node or "
                "a file system is very slow now: try again"
            )
        return result

    def says(*argv: str) -> str:
        return query(*argv).stdout

    if command := launchers.split_command(settings):
        program = shutil.which(command[0]) or ""
        version = says(program, "--version") if launchers.is_mpirun(program) else ""
    else:
        program, version = _mpirun(says)
    facts = launchers.LauncherFacts(mpirun=program, mpirun_version=version)
    if allocation.batch == "slurm":
        listed = query(*launchers.LIST_MPI_TYPES)
        facts = facts._replace(mpi_types=launchers.read_mpi_types(listed.stdout + listed.stderr))
    elif allocation.batch == "pbs":
        if tmrsh := programs.located("pbs_tmrsh"):
            facts = facts._replace(tmrsh=process.python_argv("hpcgpu.host.pbs_ranks", tmrsh))
        if (tmrsh or allocation.node_count == 1) and not any(name in os.environ for name in launchers.REMOTE_SHELL):
            facts = facts._replace(remote_shell=str(Path(process.__file__).with_name("pbs_ssh.sh")))  # no ssh is needed
        # PBS's own mpiexec may stand before it in PATH
        fits = (path for path in _installed("mpiexec") if not command and launchers.is_pals(says(path, "--version")))
        if not (pals := next(fits, "")):
            return facts
        facts = facts._replace(pals=pals)
    else:
        return facts
    return facts._replace(library=next(iter(says(sys.executable, "-c", _LIBRARY).splitlines()), ""))


def _mpirun(says: Callable[..., str]) -> tuple[str, str]:
    """Return the first mpirun or mpiexec beside this Python or in PATH, and its version; not that of PBS itself."""
    beside = (str(path) for name in _NAMES if (path := Path(sys.executable).with_name(name)).exists())
    silent = ""  # the wheel of Intel MPI has an mpirun that needs its mpiexec.hydra in PATH (2021.19)
    for program in (*beside, *_installed(*_NAMES)):
        version = says(program, "--version")
        if version and not version.startswith("pbs_version"):
            return program, version
        silent = silent or ("" if version else program)
    return silent, ""


def _installed(*names: str) -> Iterator[str]:
    """Yield the paths of programs in PATH, all of one name before those of the next."""
    for name in names:
        yield from filter(None, (shutil.which(name, path=folder) for folder in os.get_exec_path()))


class GPURunner:
    """The cluster of the ranks that run this script: rank 0 has the scheduler, the others the workers.

    Every rank runs the script down to here, and here becomes the rank program; rank 0 then starts the same script
    once more, as its child, in which this object is the way to the cluster. So what stands above runs once in each
    rank and once in the script, what stands below once. The cluster ends with the script. Without a launcher it is
    one on this machine.

    Parameters
    ----------
    **keywords
        The options.

    Raises
    ------
    ConfigError
        An option is wrong.
    LaunchError
        This is no script that could be started once more, or MPI has been started in it.

    Examples
    --------
    In script.py, for ``srun -n 9 --overcommit python script.py`` or ``python script.py``:

    >>> from distributed import Client
    >>> from hpcgpu import GPURunner
    >>> with GPURunner(gpus="sim:2") as runner, Client(runner) as client:  # doctest: +SKIP
    ...     print(client.submit(sum, [1, 2]).result())

    """

    __doc__ = keywords.documented(__doc__ or "", without=entry_points.unused(entry_points.RUNNER))
    __signature__ = inspect.Signature(keywords.parameters(entry_points.unused(entry_points.RUNNER)))

    def __init__(self, **keywords: Any) -> None:
        if SCRIPT_ADDRESS not in os.environ:
            settings = read(keywords, "keyword {name} of GPURunner", entry_point=entry_points.RUNNER).settings
            _check_script()
            _become_rank(settings, tuple(sys.orig_argv[1:]))
        from distributed import Security, Status  # 0.4 CPU s, which ranks do without

        self.scheduler_address = os.environ[SCRIPT_ADDRESS]
        self.security = Security()  # from the variables that the rank has set for its script
        self.status = Status.running

    @property
    def dashboard_link(self) -> str:
        """The dashboard's address, as in a cluster of a notebook; it holds a secret. Empty without a dashboard."""
        from hpcgpu.deploy.network.dashboard import link  # it imports distributed

        path = os.environ.get(SCRIPT_DASHBOARD) if self.status.name == "running" else None
        address = private.read(Path(path)).split("/") if path else []
        return link(int(address[2].partition(":")[2]), address[3], os.environ) if path else ""

    def close(self) -> None:
        """Let no more clients connect; the cluster ends with the script."""
        self.status = type(self.status).closed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"GPURunner({self.scheduler_address if self.status.name == 'running' else 'closed'})"

    _repr_html_ = __repr__  # a client's display in a notebook has its cluster's


def _check_script() -> None:
    """Raise LaunchError if this program cannot be started once more, as rank 0's script."""
    if sys.argv[0] in ("", "-") or "ipykernel" in sys.modules:
        raise LaunchError(
            "GPURunner starts its script once more, but this is no script (a notebook, a prompt, standard input): "
            "use LocalGPUCluster, SLURMGPUCluster or PBSGPUCluster"
        )
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized():
        raise LaunchError(
            "MPI has been started in this process (by 'from mpi4py import MPI' above GPURunner), and cannot be started "
            "twice: import it below GPURunner, or start the script by 'hpcgpu run'"
        )
