"""Names, paths, values and arguments that are hard to carry, through a whole cluster on a real Slurm."""

import json

import pytest
from lab import CHECKOUT, Lab

pytestmark = pytest.mark.timeout(400)

HARD = 'it\'s "two  words" $(id) `id` $HOME é日本 * #x !! 100% a\\b'
LINES = f"{HARD}\n\nthird line\t-n"


def test_they_arrive_unharmed_in_each_job_of_an_elastic_cluster(slurm_lab: Lab) -> None:
    folder = "/home/hpc/logs of 'é' $(id) 100% \"x\""
    python = '/home/hpc/my env\'s "$(id)"/python'
    name = 'it\'s a "cluster" of $(id) 100% é'
    slurm_lab.exec(slurm_lab.login, ["mkdir", "-p", folder], check=True)
    slurm_lab.write("called.sh", '#!/bin/sh\necho called >> ~/called\nexec /opt/venv/bin/python "$@"\n')
    install = 'rm -f called; mkdir -p "$(dirname "$1")"; install -m 755 called.sh "$1"'
    slurm_lab.exec(slurm_lab.login, ["sh", "-c", install, "sh", python], check=True)
    code = """
    import json, os, subprocess
    from distributed import Client
    from hpcgpu import SLURMGPUCluster
    given = json.load(open("given.json"))
    options = dict(gpus="sim:1", ranks="node", launcher="fork", dashboard=False, walltime="00:30:00", shape="elastic")
    with SLURMGPUCluster(**options, **given) as cluster, Client(cluster) as client:
        cluster.scale(jobs=2)
        cluster.wait_for_workers(3, timeout=120)
        ids = [row.id for row in cluster.jobs.rows]
        queue = subprocess.run(["squeue", "-h", "-r", "-o", "%j"], capture_output=True, text=True).stdout
        facts = dict(seen=list(client.run(lambda: os.environ["HARD"]).values()), names=queue.splitlines(),
                     logs=[os.path.exists(row.log) for row in cluster.jobs.rows],
                     folders=[os.path.dirname(row.log) for row in cluster.jobs.rows])
    print("FACTS", json.dumps(facts))
    """
    given = {"job_name": name, "log_directory": folder, "python": python, "env": {"HARD": HARD}}
    slurm_lab.write("given.json", json.dumps(given))
    facts = slurm_lab.facts(code)
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
