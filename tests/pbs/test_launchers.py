"""``hpcgpu launch`` in jobs of a real OpenPBS: MPICH, Intel MPI, no MPI, tcsh as login shell, GPUs of each node."""

import os
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import bound_ranks
import pytest
from paths import ROOT
from pbs_lab import HOME, PYTHON, PbsLab
from programs import INTEL_MPI, MPICH, install
from waiting import until

from hpcgpu.model import CpuSet

PROGRAMS, SCRIPT = HOME / "programs", HOME / "facts.py"
# As at sites that give GPUs by numbers: each node has numbers of its own for a job.
HOOK = """
import pbs
e = pbs.event()
if e.job.Account_Name:
    e.env["CUDA_VISIBLE_DEVICES"] = pbs.get_local_nodename()[-1]
"""
FACTS = """
import os, sys
from distributed import Client
def facts():
    return os.uname().nodename, os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("MARK")
with Client() as client:
    client.wait_for_workers(int(sys.argv[1]))
    print("FACTS", *sorted(client.run(facts).values()), flush=True)
sys.exit(3)
"""
MARK = 'it\'s "marked"'
LAUNCH = "-m hpcgpu launch --gpus sim:2x64MiB"


@pytest.fixture(scope="module", autouse=True)
def site(_lab: PbsLab) -> Iterator[None]:
    make = "qmgr -c 'create hook numbers event=execjob_launch' && cat > /tmp/numbers.py"
    read = "qmgr -c 'import hook numbers application/x-python default /tmp/numbers.py'"
    _lab.on("login01", f"{make} << 'END'\n{HOOK}END\n{read}", user="root")
    SCRIPT.write_text(FACTS)
    yield
    SCRIPT.unlink()
    shutil.rmtree(PROGRAMS, ignore_errors=True)
    _lab.on("login01", "qmgr -c 'delete hook numbers'", user="root")


def submit(lab: PbsLab, line: str, nodes: int, options: str = "", first: str = "#!/bin/bash") -> tuple[str, str]:
    """Run a job with a line; return what it prints, and its exit code."""
    out = HOME / "work" / "launch.out"
    out.unlink(missing_ok=True)
    job = f"cat > launch.sh << 'END'\n{first}\n{line}\nEND"
    place = f"-l select={nodes}:ncpus=1:mpiprocs=1:mem=1gb -l place=scatter"
    qsub = f"qsub -f -W block=true {options} -N t -j oe -o {out} {place} launch.sh; echo $?"
    ended = lab.on("login01", f"mkdir -p work; cd work; {job}\n{qsub}")
    text = until(lambda: out.exists() and out.read_text(), "the job's output is there")  # it is made empty
    return text, ended.split()[-1]


def run(lab: PbsLab, gpus: str, line: str, *variables: str, options: str = "-A gpus", **job: str) -> None:
    """Run a job on a node for each of the ``gpus``; what it prints and its exit code are the script's."""
    env = shlex.join(("env", f"MARK={MARK}", *variables))
    text, code = submit(lab, f"{env} {line} {SCRIPT} {2 * len(gpus)}", len(gpus), options, **job)
    assert code == "3", text
    each = (str((f"node{node}", gpu, MARK)) for node, gpu in enumerate(gpus, start=1) for _ in range(2))
    assert " ".join(("FACTS", *each)) in text.splitlines()
    assert not any(words in text for words in ("ends soon", "memory is unknown", "RuntimeWarning")), text
    assert not [path for name in ("launches", "rendezvous") for path in HOME.glob(f".hpcgpu/{name}/*")]


def test_bind_gives_ranks_the_places_of_workers(lab: PbsLab) -> None:
    allowed, bin = CpuSet(os.sched_getaffinity(0)), PYTHON.parent
    mpirun = [f"{bin}/mpirun", "--oversubscribe", "--bind-to", "none", "-n", str(bound_ranks.count(allowed))]
    line = shlex.join([*mpirun, f"{bin}/hpcgpu", *bound_ranks.words(allowed, str(PYTHON))])
    text, code = submit(lab, line, 1)
    assert code == "0", text
    bound_ranks.check(text, "node1", allowed)


def test_open_mpi_leaves_each_node_its_gpus(lab: PbsLab) -> None:
    run(lab, "12", f"{PYTHON} {LAUNCH}")
    run(lab, "00", f"{PYTHON} {LAUNCH}", "CUDA_VISIBLE_DEVICES=0", options="")  # a user's number, without the hook


def test_open_mpi_4_has_a_folder_that_nobody_takes_first(lab: PbsLab) -> None:
    """Without that of a random name mpirun would end: ompi.NODE.UID belongs to another user on the second node."""
    mpirun, library = Path("/usr/bin/mpirun"), Path(f"/usr/lib/{os.uname().machine}-linux-gnu/libmpi.so.40")
    if not (mpirun.exists() and library.exists()):
        pytest.skip("no Open MPI 4 of Debian here: apt-get install openmpi-bin")
    taken = f"/tmp/ompi.node2.{lab.on('node2', 'id -u').strip()}"
    lab.on("node2", f"mkdir -m 700 {taken}; chown nobody {taken}", user="root")
    before = lab.on("node2", "ls /tmp", user="root")
    try:
        run(lab, "12", f"{PYTHON} {LAUNCH} --launcher {mpirun}", f"MPI4PY_LIBMPI={library}")
        assert lab.on("node2", "ls /tmp", user="root") == before
    finally:
        lab.on("node2", f"rmdir {taken}", user="root")


def test_mpich_returns_the_scripts_exit_code(lab: PbsLab) -> None:
    mpich = install(MPICH, PROGRAMS / "mpich")
    for gpus in ("1", "12"):
        line = f"{PYTHON} {LAUNCH} --launcher {mpich}/bin/mpiexec"
        run(lab, gpus, line, f"MPI4PY_LIBMPI={mpich}/lib/libmpi.so.12")


def test_intel_mpi_starts_ranks(lab: PbsLab) -> None:
    mpiexec = install(INTEL_MPI, PROGRAMS / "intel") / "bin" / "mpiexec"
    run(lab, "12", f"{PYTHON} {LAUNCH} --launcher {mpiexec} --rendezvous file")


def test_without_an_mpi_pbs_starts_the_ranks(lab: PbsLab) -> None:
    """PBS's own mpiexec is in PATH."""
    lab.on("login01", f"{PYTHON} -m venv --without-pip {PROGRAMS}/bare", user="root")
    (packages,), (ours,) = (env.glob("lib/*/site-packages") for env in (PROGRAMS / "bare", PYTHON.parents[1]))
    (packages / "tests.pth").write_text(f"{ours}\n{ROOT}\n")
    run(lab, "1", f"{PROGRAMS}/bare/bin/python {LAUNCH}")
    run(lab, "12", f"{PROGRAMS}/bare/bin/python {LAUNCH} --rendezvous file")


def test_tcsh_is_the_login_shell_and_pbs_is_not_in_path(lab: PbsLab) -> None:
    if not Path("/bin/tcsh").exists():
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)("no /bin/tcsh; make system installs it")

    def log_in_with(shell: str) -> None:
        for machine in ("login01", *lab.nodes):
            lab.on(machine, f"sed -i '/^labuser:/s,[^:]*$,{shell},' /etc/passwd", user="root")

    log_in_with("/bin/tcsh")
    try:
        for more in ("", "--launcher pbs_tmrsh --rendezvous file"):
            run(lab, "12", f"{PYTHON} {LAUNCH} {more}", first="#!/bin/tcsh\nset path = ( /usr/bin /bin )")
    finally:
        log_in_with("/bin/bash")
