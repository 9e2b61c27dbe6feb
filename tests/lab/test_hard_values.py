"""Names, paths, values and arguments that are hard to carry, through a whole cluster on a real Slurm: or refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from lab import CHECKOUT, Lab

pytestmark = pytest.mark.timeout(400)

HARD = 'it\'s "two  words" $(id) `id` $HOME é日本 * #x !! 100% a\\b'
LINES = f"{HARD}\n\nthird line\t-n"


def client(lab: Lab, code: str, **given: Any) -> dict[str, Any]:
    """Run a client on the login node, what it is given as a dict; return its facts."""
    lab.write("given.json", json.dumps(given))
    prelude = """
    import json, os, subprocess
    from distributed import Client
    from hpcgpu import SLURMGPUCluster
    from hpcgpu.errors import ConfigError
    given = json.load(open("given.json"))
    OPTIONS = dict(gpus="sim:1", ranks="node", launcher="fork", dashboard=False, walltime="00:30:00")
    """
    return lab.facts(f"{prelude}{code}\n    print('FACTS', json.dumps(facts))\n")


def test_they_arrive_unharmed_in_each_job_of_an_elastic_cluster(slurm_lab: Lab) -> None:
    folder = "/home/hpc/logs of 'é' $(id) 100% \"x\""
    python = '/home/hpc/my env\'s "$(id)"/python'
    name = 'it\'s a "cluster" of $(id) 100% é'
    slurm_lab.exec(slurm_lab.login, ["mkdir", "-p", folder], check=True)
    slurm_lab.write("called.sh", '#!/bin/sh\necho called >> ~/called\nexec /opt/venv/bin/python "$@"\n')
    install = 'rm -f called; mkdir -p "$(dirname "$1")"; install -m 755 called.sh "$1"'
    slurm_lab.exec(slurm_lab.login, ["sh", "-c", install, "sh", python], check=True)
    code = """
    options = dict(OPTIONS, job_name=given["name"], log_directory=given["folder"], python=given["python"],
                   env={"HARD": given["value"]}, shape="elastic")
    with SLURMGPUCluster(**options) as cluster, Client(cluster) as client:
        cluster.scale(jobs=2)
        cluster.wait_for_workers(3, timeout=120)
        ids = [row.id for row in cluster.jobs.rows]
        queue = subprocess.run(["squeue", "-h", "-r", "-o", "%j"], capture_output=True, text=True).stdout
        facts = dict(seen=list(client.run(lambda: os.environ["HARD"]).values()), names=queue.splitlines(),
                     logs=[os.path.exists(row.log) for row in cluster.jobs.rows],
                     folders=[os.path.dirname(row.log) for row in cluster.jobs.rows])
    """
    facts = client(slurm_lab, code, name=name, folder=folder, python=python, value=HARD)
    assert facts["seen"] == [HARD] * 3
    assert facts["names"] == [name] * 3
    assert facts["folders"] == [folder] * 3
    assert facts["logs"] == [True] * 3
    assert len(slurm_lab.read("called").split()) >= 3, "each job has called the Python that was wanted"


@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
def test_arguments_of_a_script_pass_the_template_unharmed(slurm_lab: Lab, launcher: str) -> None:
    arguments = [HARD, LINES, "", "-n", "--", "é", " "]
    script = "a script's $(id).py"
    slurm_lab.write("show.py", "import json, sys\nprint('ARGUMENTS', json.dumps(sys.argv))\n")
    slurm_lab.exec(slurm_lab.login, ["mv", "show.py", script], check=True)
    options = ["--gpus", "sim:1", "--launcher", launcher, "--ranks", "node"]
    argv = ["sbatch", "--parsable", "-N1", "--ntasks-per-node=2", "--output=hard.log"]
    template = f"{CHECKOUT}/jobscripts/slurm.sbatch"
    job = slurm_lab.exec(slurm_lab.login, [*argv, template, *options, script, *arguments], check=True).stdout.strip()
    facts = slurm_lab.wait_job(job)
    log = slurm_lab.read("hard.log")
    assert facts["ExitCode"] == "0:0", log
    line = next(line for line in log.splitlines() if line.startswith("ARGUMENTS"))
    assert json.loads(line.removeprefix("ARGUMENTS")) == [script, *arguments]


def test_what_no_option_can_carry_is_refused_before_submission(slurm_lab: Lab) -> None:
    code = r"""
    facts = {}
    wrong = dict(job_name="two\nlines", queue="a\nb", account="a\x07b", log_directory="back\\slash", env={"A": "b\nc"},
                 python="a\0b")
    for name, value in wrong.items():
        for shape in ("gang", "elastic"):
            try:
                with SLURMGPUCluster(**OPTIONS, **{name: value}, shape=shape, scheduler="job") as cluster:
                    facts[f"{name}, {shape}"] = f"no error: {cluster.job_id}"
            except ConfigError as e:
                facts[f"{name}, {shape}"] = f"ConfigError: {e}"
    """
    squeue = ["squeue", "-h", "-t", "all", "-o", "%i"]
    before = slurm_lab.exec(slurm_lab.login, squeue).stdout
    facts = client(slurm_lab, code)
    assert {name: text for name, text in facts.items() if not text.startswith("ConfigError: ")} == {}
    assert not {*slurm_lab.exec(slurm_lab.login, squeue).stdout.split()} - {*before.split()}, "a job was submitted"
