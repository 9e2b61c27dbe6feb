"""PBSGPUCluster against programs that replay a recorded OpenPBS; the job itself is real, on this machine."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import ranks
from distributed import Client
from recordings import Record, records

from hpcgpu import PBSGPUCluster
from hpcgpu.errors import ConfigError, JobError, SubmitError

pytestmark = pytest.mark.mpi
DATA = Path(__file__).parent / "data" / "batch" / "pbs" / "release"

# qsub starts the script as PBS would (in a session of its own), and answers with an id.
QSUB = """
import os, subprocess, sys
folder = {folder!r}
script = sys.stdin.read()
open(f"{{folder}}/script", "w").write(script)
env = {{**os.environ, "PBS_JOBID": "1021.login01", "PBS_O_WORKDIR": os.getcwd()}}
log = open(f"{{os.getcwd()}}/hpcgpu.o1021", "w")
quiet = dict(stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
job = subprocess.Popen(["bash", "-c", script], env=env, **quiet)
open(f"{{folder}}/pid", "w").write(str(job.pid))
print("1021.login01")
"""
QSTAT = """
import sys
folder, running, ended = {folder!r}, {running!r}, {ended!r}
try:
    alive = open(f"/proc/{{open(f'{{folder}}/pid').read()}}/stat").read().rpartition(")")[2].split()[0] != "Z"
except OSError:
    alive = False
code, out, err = running if alive else ended
sys.stdout.write(out); sys.stderr.write(err); sys.exit(code)
"""
QDEL = """
import os, signal
try:
    os.killpg(int(open({folder!r} + "/pid").read()), signal.SIGTERM)
except ProcessLookupError:
    pass
"""


def recorded(name: str, words: str) -> Record:
    return next(r for r in records(DATA / name) if words in r.command)


def program(folder: Path, name: str, code: str) -> None:
    path = folder / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!{sys.executable}\n{textwrap.dedent(code)}")
    path.chmod(0o755)


@pytest.fixture
def pbs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    running = recorded("05-qstat-json-R.txt", "qstat -f -F json")
    ended = recorded("11-qstat-finished.txt", "qstat -f -F json")
    facts = {"running": (0, running.stdout, ""), "ended": (35, "", ended.stderr.replace("1027", "1021"))}
    program(tmp_path, "qsub", QSUB.format(folder=str(tmp_path)))
    program(tmp_path, "qstat", QSTAT.format(folder=str(tmp_path), **facts))
    program(tmp_path, "qdel", QDEL.format(folder=str(tmp_path)))
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{ranks.BIN}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, value in ranks.environment().items():
        if name.startswith("OMPI_"):
            monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    return tmp_path


OPTIONS = {"gpus": "sim:2", "nodes": 1, "queue": "gpu", "account": "a-b", "walltime": "00:10:00"}


def test_a_cluster_from_start_to_end(pbs: Path) -> None:
    with PBSGPUCluster(**OPTIONS) as cluster, Client(cluster) as client:
        assert cluster.job_id == "1021.login01"
        assert client.submit(sum, [1, 2]).result() == 3
        assert len(client.scheduler_info()["workers"]) == 2
        script = cluster.job_script()
    assert (pbs / "script").read_text() == script
    assert "#PBS -q gpu\n" in script
    assert "#PBS -l select=1:ncpus=2:mpiprocs=2\n" in script
    words = shlex.split(script.splitlines()[-1])
    assert json.loads(words[-1])["settings"]["account"] == "a-b"
    assert not Path(f"/proc/{(pbs / 'pid').read_text()}/cmdline").exists() or is_dead(pbs)


def is_dead(pbs: Path) -> bool:
    out = subprocess.run(["qstat"], capture_output=True, text=True)
    return out.returncode == 35


def test_a_refusal_reaches_the_caller_in_qsubs_words(pbs: Path) -> None:
    refused = recorded("02-qsub-bad-queue.txt", "qsub -q nosuch")
    program(pbs, "qsub", f"import sys\nsys.stderr.write({refused.stderr!r})\nsys.exit({refused.returncode})")
    with pytest.raises(SubmitError, match="qsub refused the job: qsub: Unknown queue"):
        PBSGPUCluster(**OPTIONS)


def test_a_job_that_fails_raises_with_its_exit_code_and_log(pbs: Path) -> None:
    with pytest.raises(JobError, match=r"job 1021.login01 has ended: .*exit code 1; the end of its log (.|\n)*900"):
        PBSGPUCluster(**OPTIONS, memory_limit="900TB")


def test_nothing_is_submitted_for_bad_input(pbs: Path) -> None:
    with pytest.raises(ConfigError, match="how many GPUs of each node"):
        PBSGPUCluster(nodes=2)
    with pytest.raises(ConfigError, match="nodes"):
        PBSGPUCluster(nodes=0, gpus="sim:2")
    assert not (pbs / "script").exists()
