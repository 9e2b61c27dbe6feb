"""Which launcher is taken, its command line, and a rank's place: from what real programs said and set."""

import os
import re
import subprocess
import sys
from typing import Any

import pytest
from paths import DATA

from hpcgpu.config.layers import read_settings
from hpcgpu.deploy.settings import in_job
from hpcgpu.errors import LaunchError
from hpcgpu.host.process import LAUNCHER
from hpcgpu.launch.environment import (
    brought,
    inherited_variables,
    is_isolated,
    launcher_environ,
    rank_shell,
    read_allocation,
    read_launch,
    read_local_rank,
    read_rank,
    read_step_masks,
)
from hpcgpu.launch.launchers import (
    LauncherFacts,
    RankCommand,
    mpirun_command,
    plan_launch,
    read_flavour,
    read_mpi_types,
    srun_command,
)
from hpcgpu.model import Allocation, RankFacts, Settings
from hpcgpu.model.allocation import (
    DOCUMENT,
    JOB_MEMORY,
    JOB_NODES,
    JOB_RESTARTS,
    SCRIPT_ADDRESS,
    SCRIPT_ENV,
    TASK,
    World,
)
from hpcgpu.model.site import Launcher, Site

RECORDED = DATA / "launch/version"
RANK = ("python", "-m", "hpcgpu.agent", "a document")
TWO = World(nodes=2, per_node=4)
OPENMPI_4 = "Open MPI v4.1.4, package: Debian OpenMPI, ident: 4.1.4, repo rev: v4.1.4, May 26, 2022"
MPICH = "MPICH Version:      5.0.2"
CRAY = "MPI VERSION    : CRAY MPICH version 8.1.28.29 (ANL base 3.4a2)"
SLURM = Allocation(batch="slurm", job_id="7", node_count=2)
PBS = Allocation(batch="pbs", job_id="7.login01")
TYPES = ("pmix", "none", "pmi2", "cray_shasta")
AS_ROOT = World(nodes=2, per_node=4, hosts=("a", "b"), as_root=True)
ON_A_AND_B = World(nodes=2, hosts=("a", "b"), variables=("X", "Y"))
ROUND_ROBIN = "--map-by node:OVERSUBSCRIBE --rank-by slot --bind-to none"
HOSTS = World(nodes=2, per_node=4, hosts=("node0001", "node0002"), variables=("FOO", "PATH"))
ENVIRONMENTS = DATA / "launch/environment"
OF_SCRIPT = [("0,1", "0,1"), ("", ""), ("-1", "-1"), ("GPU-8ef5", "none"), ("0$(reboot)", "none"), (None, "none")]
OF_TASK = [("2", "0", "0"), ("2", "", ""), ("MIG-8ef5", "0", "0"), (None, "3", "3")]


def recorded(name: str) -> str:
    return (RECORDED / f"{name}.txt").read_text()


@pytest.mark.parametrize(
    ("name", "flavour"),
    [
        ("mpirun-openmpi-5.0.11", "openmpi-5"),
        ("mpiexec-openmpi-5.0.11", "openmpi-5"),
        ("mpirun-openmpi-4.1.4", "openmpi-4"),
        ("mpiexec-openmpi-4.1.4", "openmpi-4"),
        ("mpiexec-mpich-5.0.2", "mpich"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.19.0 Build 20260929 (id: 1821d9b)\n", "intel"),
        *(("mpirun (Open MPI) 5.0.0rc7\n", "openmpi-5"), ("mpirun (Open MPI) 6.0.0rc2\n", "openmpi-6")),
        ("mpiexec version 1.2.12 revision 0fe8d6a\n", "pals"),
    ],
)
def test_a_program_is_known_by_what_it_says(name: str, flavour: str) -> None:
    assert read_flavour(name if "\n" in name else recorded(name)) == flavour


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("", "'nothing'"),
        ("mpirun (IBM Spectrum MPI) 10.3.1\nmore", "'mpirun (IBM Spectrum MPI) 10.3.1'"),
        ("mpirun (Open MPI) 3.1.6\n", "'mpirun (Open MPI) 3.1.6'"),
        ("pbs_version = 23.06.06\n", "'pbs_version = 23.06.06'"),
    ],
)
def test_an_unknown_mpirun_is_named_with_what_to_do(text: str, shown: str) -> None:
    with pytest.raises(LaunchError, match=re.escape(shown) + ".*--launcher"):
        read_flavour(text)


@pytest.mark.parametrize(
    ("flavour", "world", "flags"),
    [
        ("openmpi-5", TWO, f"--continuous {ROUND_ROBIN} -n 9"),
        ("openmpi-4", TWO, f"{ROUND_ROBIN} -n 9"),
        ("mpich", TWO, "-disable-auto-cleanup -ppn 1 -bind-to none -genvnone -n 9"),
        ("mpich", World(per_node=2), "-disable-auto-cleanup -ppn 1 -bind-to none -n 3"),
        ("intel", TWO, "-disable-auto-cleanup -ppn 1 -genv I_MPI_PIN 0 -genvnone -n 9"),
        ("pals", TWO, "--no-abort-on-failure --cpu-bind none --ppn 5 -n 10"),
        ("pals", World(nodes=2, extra=False), "--no-abort-on-failure --cpu-bind none --ppn 1 -n 2"),
        ("mpich", ON_A_AND_B, "-disable-auto-cleanup -ppn 1 -bind-to none -hosts a,b -genvlist X,Y -n 3"),
        ("openmpi-5", AS_ROOT, f"--continuous {ROUND_ROBIN} --host a:4,b:4 --allow-run-as-root -n 9"),
    ],
)
def test_the_command_line_of_mpirun(flavour: str, world: World, flags: str) -> None:
    assert mpirun_command(RANK, world, "/opt/mpirun", flavour) == ("/opt/mpirun", *flags.split(), *RANK)


def test_the_command_line_of_srun() -> None:
    flags = "--nodes=2 --ntasks=9 --overcommit --cpu-bind=none --kill-on-bad-exit=0 --no-kill"
    assert srun_command(RANK, TWO, "pmix") == ("srun", *flags.split(), "--mpi=pmix", *RANK)
    assert read_mpi_types(recorded("srun-mpi-list-22.05.8")) == TYPES
    # as Slurm wrote it before 21.08
    old = "srun: MPI types are...\nsrun: none\nsrun: pmi2\nsrun: pmix_v3\n"
    assert read_mpi_types(old) == ("none", "pmi2", "pmix_v3")
    assert read_mpi_types("") == ()


def plan(allocation: Allocation, found: LauncherFacts, **chosen: Any) -> RankCommand:
    return plan_launch(RANK, Settings(**chosen), allocation, found, TWO)


WHEEL = LauncherFacts(mpirun="/opt/mpirun", mpirun_version=recorded("mpirun-openmpi-5.0.11"))


@pytest.mark.parametrize(
    ("library", "types", "mpi_type"),
    [
        (OPENMPI_4, TYPES, "pmix"),
        (MPICH, TYPES, "pmi2"),  # Debian's Slurm lists cray_shasta, too: that is for Cray's library alone
        (CRAY, TYPES, "cray_shasta"),
        (CRAY, ("none", "pmi2"), "pmi2"),
    ],
)
def test_in_a_slurm_job_srun_speaks_what_the_library_speaks(
    library: str, types: tuple[str, ...], mpi_type: str
) -> None:
    launch = plan(SLURM, LauncherFacts(mpi_types=types, library=library, mpirun="/opt/mpirun"))
    assert (launch.argv[0], f"--mpi={mpi_type}" in launch.argv) == ("srun", True)
    assert launch.env == ((("PMIX_MCA_psec", "native"),) if mpi_type == "pmix" else ())


def test_srun_without_pmix_starts_ranks_that_meet_by_file() -> None:
    found = WHEEL._replace(mpi_types=("none", "pmi2"), library=OPENMPI_4)  # not the library's type
    for chosen in ({}, {"launcher": "srun"}):
        launch = plan(SLURM, found, **chosen)
        assert (launch.argv[0], "--mpi=none" in launch.argv, launch.by_file) == ("srun", True, True)
    for chosen in ({"launcher": "mpirun"}, {"sources": {"rendezvous": "a keyword"}}):
        launch = plan(SLURM, found, **chosen)
        assert (launch.argv[0], launch.by_file) == ("/opt/mpirun", False)
    assert not plan(SLURM, found._replace(mpi_types=TYPES)).by_file


def test_mpirun_starts_ranks_without_srun() -> None:
    found = WHEEL._replace(mpi_types=("none", "pmix"), library=MPICH)  # not the library's type
    assert plan(SLURM, found).argv[0] == "/opt/mpirun"
    assert "--mpi=none" in plan(SLURM, LauncherFacts(), rendezvous="file").argv
    assert plan(PBS, WHEEL).argv[0] == "/opt/mpirun"
    assert plan(Allocation(), WHEEL) == RankCommand(RANK)
    assert plan(Allocation(), WHEEL, launcher="mpirun").argv[0] == "/opt/mpirun"


@pytest.mark.parametrize(
    ("allocation", "found", "chosen", "words"),
    [
        (SLURM, LauncherFacts(mpi_types=("none",)), {}, r"srun supports none .*not installed.*pip install openmpi"),
        (SLURM, LauncherFacts(mpi_types=("none",), library=MPICH), {"launcher": "srun"}, "srun supports none.*MPICH"),
        (Allocation(), LauncherFacts(), {"launcher": "srun"}, "needs a Slurm job: salloc, sbatch"),
        (SLURM, LauncherFacts(), {"launcher": "fork"}, "one process on this node, but the job has 2"),
        (SLURM, LauncherFacts(), {"launcher": "aprun"}, "launcher='aprun'.* allowed: srun, mpirun, pbs_tmrsh, fork"),
        (PBS, WHEEL, {"launcher": "ssh"}, "launcher='ssh' .* allowed: srun, mpirun, .*, or a command"),
        (PBS, WHEEL._replace(pals="/opt/pals"), {"launcher": "pals"}, "launcher='pals' .* allowed: srun"),
        (SLURM, WHEEL, {"launcher": "pbs_tmrsh"}, "needs a PBS job, .* rendezvous='file'"),
        (PBS, LauncherFacts(), {"launcher": "/opt/none -x"}, "there is no program /opt/none on this node"),
        (PBS, WHEEL, {"launcher": "mpirun 'x"}, "No closing quotation"),
    ],
)
def test_no_launcher_fits(allocation: Allocation, found: LauncherFacts, chosen: dict[str, str], words: str) -> None:
    with pytest.raises(LaunchError, match=words):
        plan(allocation, found, **chosen)


OPENMPI = WHEEL._replace(remote_shell="/x/ssh")
PALS = OPENMPI._replace(pals="/opt/cray/pals/mpiexec")


def test_the_order_is_the_sites_own_then_pals_then_mpirun() -> None:
    site = Site(name="here", batch="pbs", launcher=Launcher(command=("/opt/start", "--all")))
    assert plan_launch(RANK, Settings(), PBS, OPENMPI, HOSTS).argv[0] == "/opt/mpirun"
    argv = plan_launch(RANK, Settings(), PBS, PALS, HOSTS).argv
    flags = ("--no-abort-on-failure", "--cpu-bind", "none", "--ppn", "5", "-n", "10")
    assert argv == ("/opt/cray/pals/mpiexec", *flags, *RANK)
    own = in_job(Settings(), site, "pbs")
    assert own.where("launcher") == "site here"
    start = PALS._replace(mpirun="/opt/start", mpirun_version="")
    assert plan_launch(RANK, own, PBS, start, HOSTS).argv == ("/opt/start", "--all", *RANK)
    assert in_job(Settings(launcher="mpirun"), site, "pbs").launcher == "mpirun"
    assert in_job(Settings(), site, "local").launcher is None
    # PALS starts no ranks that do not understand it
    found = PALS._replace(library="Open MPI v5.0.11, package: Open MPI")
    assert plan_launch(RANK, Settings(), PBS, found, HOSTS).argv[0] == "/opt/mpirun"
    assert plan_launch(RANK, Settings(rendezvous="file"), PBS, found, HOSTS).argv[0] == PALS.pals


def test_pbs_without_an_mpi_starts_a_rank_on_each_node() -> None:
    bare = LauncherFacts(tmrsh=("python", "-m", "hpcgpu.host.pbs_ranks", "/opt/pbs/bin/pbs_tmrsh"))
    assert plan_launch(RANK, Settings(), PBS, bare, World(hosts=("node0001",))) == RankCommand(RANK)
    launch = plan_launch(RANK, Settings(rendezvous="file"), PBS, bare, HOSTS)
    assert launch.argv == (*bare.tmrsh, "node0001,node0002", "FOO,PATH", *RANK)
    chosen = Settings(rendezvous="file", launcher="pbs_tmrsh")
    assert plan_launch(RANK, chosen, PBS, OPENMPI._replace(tmrsh=bare.tmrsh), HOSTS) == launch
    assert plan_launch(RANK, Settings(rendezvous="file"), PBS, OPENMPI, HOSTS).argv[0] == "/opt/mpirun"
    with pytest.raises(LaunchError, match=r"no mpirun and no mpiexec .*pip install openmpi.*module.*rendezvous='file'"):
        plan_launch(RANK, Settings(), PBS, bare, HOSTS)
    with pytest.raises(LaunchError, match=r"ranks that meet by file .* rendezvous='file'"):
        plan_launch(RANK, Settings(launcher="pbs_tmrsh"), PBS, bare, HOSTS)
    with pytest.raises(LaunchError, match="one process on this node, but the job has 2"):
        plan_launch(RANK, Settings(launcher="fork"), PBS, bare, HOSTS)


def test_pbs_reaches_other_nodes_with_the_scripts_variables() -> None:
    launch = plan_launch(RANK, Settings(), PBS, OPENMPI, HOSTS)
    assert " --bind-to none --host node0001:4,node0002:4 -x FOO -x PATH -n 9 " in " ".join(launch.argv)
    assert dict(launch.env)["PRTE_MCA_plm_ssh_agent"] == "/x/ssh"
    assert plan_launch(RANK, Settings(), PBS, OPENMPI, World(hosts=("node0001",))).env == launch.env[:1]
    hydra = OPENMPI._replace(mpirun_version=recorded("mpiexec-mpich-5.0.2"))
    launch = plan_launch(RANK, Settings(), PBS, hydra, HOSTS)
    assert " -bind-to none -hosts node0001,node0002 -genvlist FOO,PATH -n 9 " in " ".join(launch.argv)
    assert dict(launch.env)["HYDRA_LAUNCHER_EXEC"] == dict(launch.env)["I_MPI_HYDRA_BOOTSTRAP_EXEC"] == "/x/ssh"
    # the user's words stand before ours
    settings = Settings(launcher="mpirun --mca btl 'self,tcp'")
    argv = plan_launch(RANK, settings, PBS, OPENMPI, HOSTS).argv
    assert argv[:5] == ("/opt/mpirun", "--mca", "btl", "self,tcp", "--continuous")


# --- rank 3 of 5 on 2 nodes (3 + 2) of Slurm 22.05.8 with GPUs, rank 1 of 3 without a batch system


def environ_of(name: str) -> dict[str, str]:
    lines = (ENVIRONMENTS / f"{name}.txt").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines)


@pytest.mark.parametrize(
    ("name", "facts", "launch"),
    [
        ("openmpi-5-mpirun", RankFacts(1, 3, 1, 3, "Open MPI mpirun"), "prterun-node1-4201@1"),
        ("mpich-mpiexec", RankFacts(1, 3, 1, 3, "MPICH mpiexec"), ""),
        ("srun-pmix", RankFacts(3, 5, 0, None, "srun", "pmix"), "80.0"),
        ("srun-pmi2", RankFacts(3, 5, 0, None, "srun", "pmi2"), "81.0"),
        ("srun-none", RankFacts(3, 5, 0, None, "srun", ""), "82.0"),
        ("openmpi-4-mpirun-in-salloc", RankFacts(3, 5, 0, 2, "Open MPI mpirun"), "4078698497"),
        ("openmpi-5-mpirun-in-salloc", RankFacts(3, 5, 0, 2, "Open MPI mpirun"), "prterun-slurmctld-4247@1"),
        ("sbatch", RankFacts(), ""),
        ("salloc", RankFacts(), ""),
    ],
)
def test_a_rank_knows_its_place_and_its_launch(name: str, facts: RankFacts, launch: str) -> None:
    environ = environ_of(name)
    assert read_rank(environ) == facts
    assert read_launch(environ) == read_launch(environ | {"PBS_JOBID": "7.login01"}) == launch


TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
FLUX = {"FLUX_TASK_LOCAL_ID": "1", "FLUX_TASK_RANK": "5", "FLUX_JOB_SIZE": "8", "FLUX_JOB_NNODES": "2"}
PALS_RANK = {"PALS_RANKID": "5", "PMI_SIZE": "8", "PALS_LOCAL_RANKID": "1", "PMI_LOCAL_SIZE": "4", "PMI_RANK": "5"}


@pytest.mark.parametrize(
    ("name", "more", "place"),
    [
        ("openmpi-5-mpirun", {}, (1, 3, 1, 3, "Open MPI mpirun")),
        ("mpich-mpiexec", {}, (1, 3, 1, 3, "MPICH mpiexec")),
        ("srun-pmix", {}, (3, 5, 0, 2, "srun")),  # 3,2 tasks, on the second node
        ("srun-pmi2", {}, (3, 5, 0, 2, "srun")),
        ("srun-gpus-per-task", {}, (3, 4, 1, 2, "srun")),  # 2(x2) tasks
        ("openmpi-5-mpirun-in-salloc", {}, (3, 5, 0, 2, "Open MPI mpirun")),
        ("salloc", {}, (0, 1, None, None, "none")),
        # not recorded, but documented: torchrun's page, flux-environment(7), mpiexec(1) of PALS
        ("srun-none", TORCHRUN, (5, 8, 1, 4, "torchrun")),
        ("salloc", FLUX | {"PMI_RANK": "5", "PMI_SIZE": "8"}, (5, 8, 1, 4, "Flux")),
        ("openmpi-5-mpirun", FLUX, (1, 3, 1, 3, "Open MPI mpirun")),
        ("salloc", FLUX | {"FLUX_JOB_SIZE": "7"}, (5, 7, 1, None, "Flux")),
        ("salloc", PALS_RANK, (5, 8, 1, 4, "PALS mpiexec")),
        ("salloc", {name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE")}, (0, 1, None, None, "none")),
    ],
)
def test_local_rank_is_that_of_the_innermost_launcher(name: str, more: dict[str, str], place: tuple[Any, ...]) -> None:
    assert read_local_rank(environ_of(name) | more)[:5] == place


def test_tasks_of_pbs_have_local_numbers_on_one_node() -> None:
    environ = {"PBS_JOBID": "7.login01", TASK[0]: "1", TASK[1]: "4"}
    assert read_local_rank(environ)[:4] == (1, 4, 1, 4)
    assert read_local_rank(environ | {JOB_NODES: "2"})[:4] == (1, 4, None, None)


@pytest.mark.parametrize(
    ("kind", "masks", "pus"),
    [
        ("mask_cpu:", "0x0000000F,0x00000000000000F000000000", ["0-3", "36-39"]),
        ("map_cpu:", "0,0x8", ["0", "8"]),
        ("none", "", []),
        ("", "0x1", []),
    ],
)
def test_masks_of_a_step_are_those_of_its_tasks(kind: str, masks: str, pus: list[str]) -> None:
    environ = {"SLURM_CPU_BIND_TYPE": kind, "SLURM_CPU_BIND_LIST": masks}
    assert [str(mask) for mask in read_step_masks(environ) or ()] == pus


def test_a_step_bound_by_a_rule_has_unknown_masks() -> None:
    assert read_step_masks({"SLURM_CPU_BIND_TYPE": "rank:", "SLURM_CPU_BIND_LIST": ""}) is None
    assert read_step_masks({"SLURM_CPU_BIND_TYPE": "none", "SLURM_CPU_BIND_LIST": ""}) == ()
    assert read_step_masks({}) == ()


def test_variables_of_mpiruns_daemon_are_not_the_ranks() -> None:
    environ = environ_of("openmpi-4-mpirun-in-salloc")
    assert (environ["SLURM_PROCID"], environ["SLURM_NTASKS"]) == ("1", "2")
    assert (read_rank(environ).rank, read_rank(environ).size) == (3, 5)
    assert read_rank(dict(zip(TASK, "13", strict=True))) == RankFacts(1, 3, None, None, "pbs_tmrsh")
    # mpiexec(1) of PALS, "Environment variables"; no machine of this kind was at hand to record
    environ = {"PALS_RANKID": "3", "PMI_RANK": "3", "PMI_SIZE": "5", "PALS_LOCAL_RANKID": "0", "PMI_LOCAL_SIZE": "2"}
    assert read_rank(environ) == RankFacts(3, 5, 0, 2, "PALS mpiexec")


def test_the_job_around_a_rank() -> None:
    for name in ("sbatch", "salloc"):
        found = read_allocation(environ_of(name))
        assert (found.batch, found.node_count, found.gpus_per_node) == ("slurm", 2, 4)
    for written in ("4", "gpu:4", "a100:4", "gpu:a100:4", "4(x2)"):
        assert read_allocation(environ_of("salloc") | {"SLURM_GPUS_PER_NODE": written}).gpus_per_node == 4
    # as sbatch --array=3-5 sets them, Slurm 22.05: SLURM_JOB_ID is a raw number that squeue does not show
    array = {"SLURM_JOB_ID": "125", "SLURM_ARRAY_JOB_ID": "123", "SLURM_ARRAY_TASK_ID": "4"}
    assert read_allocation(environ_of("sbatch") | array).job_id == "123_4"
    assert read_allocation({"PBS_JOBID": "123[4].server"}).job_id == "123[4].server"
    assert read_allocation(environ_of("sbatch")).memory == (4000 << 20, "--mem of the job: SLURM_MEM_PER_NODE=4000")
    step = read_allocation(environ_of("srun-pmix"))
    assert (step.node_name, step.node_count, step.restart_count, step.rank.rank) == ("node2", 2, 0, 3)
    again = environ_of("sbatch") | {"SLURM_RESTART_COUNT": "2"}
    assert read_allocation(again).restart_count == 2
    assert read_allocation(environ_of("openmpi-5-mpirun")).batch == "local"
    assert read_allocation({"HPCGPU_JOB_ID": "9"}) == Allocation(job_id="9")
    assert read_allocation({"PBS_JOBID": "7.login01"}) == Allocation(batch="pbs", job_id="7.login01")


@pytest.mark.parametrize("name", ["sbatch", "srun-pmix", "openmpi-5-mpirun-in-salloc"])
def test_another_job_inherits_the_users_variables_only(name: str) -> None:
    """srun would take SLURM_MEM_PER_NODE for an option; of a run, the scheduler is this job's."""
    own = {"PATH": "/bin", "SLURM_CONF": "/etc/slurm.conf", "OMPI_MCA_btl": "tcp", "HPCGPU_QUEUE": "gpu", "DASK_X": "1"}
    of_script = {"HPCGPU_SCRIPT_ENV": "DASK_SCHEDULER_ADDRESS,HPCGPU_SCRIPT_SCHEDULER", "HPCGPU_SCRIPT_SCHEDULER": "a"}
    environ = {**environ_of(name), **own, **of_script, "DASK_SCHEDULER_ADDRESS": "a"}
    left = environ.keys() - inherited_variables(environ)
    assert own.keys() <= left
    theirs = ("SLURM", "PMIX_", "OMPI_COMM", "HPCGPU_SCRIPT", "DASK_S")
    assert not [n for n in left - own.keys() if n.startswith(theirs)]
    assert inherited_variables(own | {"SLURM_MPI_TYPE": "pmix"}) == frozenset()  # on a login node all is the user's


def test_no_variable_of_ours_is_taken_for_an_option() -> None:
    """A script in a run that makes a cluster reads options from an environment with all of them."""
    ours = (LAUNCHER, JOB_NODES, JOB_RESTARTS, JOB_MEMORY, DOCUMENT, SCRIPT_ADDRESS, SCRIPT_ENV, *TASK)
    assert read_settings({}, environ=dict.fromkeys(ours, "x")).sources == {}


# As set in a job of Slurm 22.05.8 on 4 of a node's cores with 4 GPUs, and in its steps, by each option of sbatch.
@pytest.mark.parametrize(
    ("set_by_slurm", "mib"),
    [
        ({"SLURM_MEM_PER_NODE": "2048"}, 2048),
        ({"SLURM_MEM_PER_CPU": "500", "SLURM_CPUS_ON_NODE": "4"}, 2000),
        ({"SLURM_MEM_PER_GPU": "1024", "SLURM_GPUS_ON_NODE": "4"}, 4096),
        ({"SLURM_CPUS_ON_NODE": "4"}, None),  # --mem=0, and no option at all
        ({"SLURM_MEM_PER_NODE": "0"}, None),
        ({"SLURM_MEM_PER_CPU": "500"}, None),
        ({"SLURM_MEM_PER_NODE": "2G"}, None),  # not what Slurm writes
    ],
)
def test_the_memory_that_the_job_has_asked_for(set_by_slurm: dict[str, str], mib: int | None) -> None:
    bare = {k: v for k, v in environ_of("salloc").items() if "MEM_PER" not in k and "_ON_NODE" not in k}
    found = read_allocation(bare | set_by_slurm).memory
    assert (found.nbytes >> 20 if found else None) == mib
    if found:  # the words name what was set
        assert all(f"{name}={value}" in found.source for name, value in set_by_slurm.items())


@pytest.mark.parametrize(
    ("set_by_slurm", "isolated"),
    [
        ({"SLURMD_TRES_BIND": "gpu:single:1"}, True),
        ({"SLURMD_TRES_BIND": "gpu:verbose,map_gpu:0,1"}, True),
        ({"SLURMD_TRES_BIND": "gpu:closest"}, True),
        ({"SLURMD_TRES_BIND": "gres/gpu:per_task:1"}, True),  # since 24.11
        ({"SLURMD_TRES_BIND": "gpu:none"}, False),
        ({"SLURMD_TRES_BIND": "gpu:none", "SLURM_GPUS_PER_TASK": "1"}, False),  # srun --gpu-bind=none undoes it
        ({"SLURM_GPUS_PER_TASK": "1"}, True),
        ({"SLURM_GPU_BIND": "single:1"}, True),
        ({"SLURM_GPU_BIND": "none"}, False),
        ({}, False),
    ],
)
def test_tasks_with_gpus_of_their_own_are_seen(set_by_slurm: dict[str, str], isolated: bool) -> None:
    assert is_isolated(environ_of("srun-none") | set_by_slurm) == isolated
    assert is_isolated(environ_of("srun-gpus-per-task"))


@pytest.mark.parametrize(
    ("of_job", "gpus"),
    [
        ({"SLURM_GPUS_PER_TASK": "1"}, "8"),
        ({"SLURM_TRES_PER_TASK": "gres/gpu=1", "SLURM_TRES_BIND": "gres/gpu:per_task:1"}, "8"),
        ({"SLURM_TRES_PER_TASK": "cpu:2,gres/gpu:a100:2"}, "16"),
        ({"SLURM_TRES_PER_TASK": "gres/gpu"}, "8"),  # --tres-per-task=gres/gpu
        ({"SLURM_TRES_PER_TASK": "cpu=2"}, None),  # --cpus-per-task=2
        ({"SLURM_GPUS_PER_TASK": "1", "SLURM_GPUS_PER_NODE": "4"}, None),
        ({"SLURM_NTASKS_PER_GPU": "1", "SLURM_GPUS": "6"}, "6"),
        ({}, None),
    ],
)
def test_launcher_has_all_gpus_of_a_job_with_some_per_task(of_job: dict[str, str], gpus: str | None) -> None:
    environ = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "HOME": "/h"}
    kept = {"SLURM_GPUS_PER_NODE": of_job["SLURM_GPUS_PER_NODE"]} if "SLURM_GPUS_PER_NODE" in of_job else {}
    expected = environ | kept | ({"SLURM_GPUS": gpus} if gpus else {})
    assert launcher_environ(environ | of_job) == expected


@pytest.mark.parametrize(("script", "task", "rank"), [*((s, None, r) for s, r in OF_SCRIPT), *OF_TASK])
def test_the_gpus_of_a_nodes_task_are_its_ranks(script: str | None, task: str | None, rank: str) -> None:
    """Numbers of the script are for tasks to which PBS gave none."""
    first, there = ({"CUDA_VISIBLE_DEVICES": value} if value is not None else {} for value in (script, task))
    shell = rank_shell(first, gives_gpus=True)
    words = (*shell, "/bin/sh", "-c", 'echo "${CUDA_VISIBLE_DEVICES-none} $1"', "sh", "it's 'one' word")
    done = subprocess.run(words, env=there, capture_output=True, text=True, check=True)
    assert done.stdout == f"{rank} it's 'one' word\n"


def test_a_warning_does_not_kill_a_rank_that_is_starting() -> None:
    code = "import os, signal; os.kill(os.getpid(), signal.SIGUSR1); print('lives')"
    words = (*rank_shell({}, gives_gpus=False), sys.executable, "-S", "-c", code)
    done = subprocess.run(words, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "lives\n")


def test_functions_that_bash_exports_reach_a_rank() -> None:
    """As Lmod's; Debian's sh drops them."""
    env = {"PATH": os.environ["PATH"], "BASH_FUNC_module%%": "() {  echo loaded $1\n}", "LINES_": "a\n\nb=\udcff"}
    words = (*rank_shell(env, gives_gpus=False), "bash", "-c", 'module x; printf "$LINES_"')
    done = subprocess.run(words, env=env, capture_output=True)
    assert (done.stdout, done.stderr) == (b"loaded x\na\n\nb=\xff", b"")


def test_what_each_node_has_of_its_own_is_not_brought_to_others() -> None:
    ours = {"PATH": "/x/bin", "LD_LIBRARY_PATH": "/x/lib", "HPCGPU_NODES": "2", "OMP_NUM_THREADS": "4"}
    theirs = {
        **{"PBS_JOBID": "7.login01", "PBS_NODENUM": "0", "NCPUS": "4", "TMPDIR": "/var/tmp/pbs.7.login01"},
        **{"OMPI_MCA_btl": "self", "PWD": "/home/u", "_": "/bin/env", "BASH_FUNC_module%%": "() { :; }"},
        "CUDA_VISIBLE_DEVICES": "GPU-8ef5,GPU-11aa",
    }
    assert set(brought(ours | theirs)) == set(ours)
    assert brought({"CUDA_VISIBLE_DEVICES": "0,1", "ROCR_VISIBLE_DEVICES": "0"}) == ()
    assert "TMPDIR" in brought({"TMPDIR": "/local", "PBS_JOBID": "7.login01"})
    # what PBS does not count is counted
    environ = {"PBS_JOBID": "7.login01", "HPCGPU_JOB_NODES": "3", "HPCGPU_JOB_RESTARTS": "1"}
    found = read_allocation(environ)
    assert (found.node_count, found.restart_count) == (3, 1)
