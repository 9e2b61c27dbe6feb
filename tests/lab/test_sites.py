"""From the name of a site to a cluster: a draft of the lab's own facts, taken as it is, and one that says too much."""

import re
import shlex

import pytest
from lab import CHECKOUT, Lab, LabUnavailable
from pages import LINES, README, line

FILE = ".config/hpcgpu/sites/lab.yaml"
CLUSTER = """
from distributed import Client
from hpcgpu import SLURMGPUCluster

with SLURMGPUCluster(gpus="sim:4", walltime="01:00:00") as cluster, Client(cluster) as client:
    print(client.submit(sum, [1, 2, 3]).result(), cluster.settings.queue)
    print(cluster.explain())
"""


# What `python3 -m venv` gives on a machine that reaches a package index. The lab does not: pip finds the packages of
# the checkout's venv installed already, and installs hpcgpu itself.
VENV = """
set -e
rm -rf ~/site
python3 -m venv ~/site
# what is compiled is the lab's Python's; only what builds the wheel comes from the checkout's venv
printf '%s\\n' /opt/venv/lib/python3*/site-packages {packages} > $(echo ~/site/lib/python3*/site-packages)/index.pth
"""


def hpcgpu(lab: Lab, *words: str, site: str = "lab") -> tuple[str, str]:
    """Run a command on the login node as somebody who has said the site's name; return both of its outputs."""
    argv = ["python", "-m", "hpcgpu", *words]
    done = lab.exec(lab.login, argv, env={"HPCGPU_SITE": site})
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.fixture
def draft(slurm_lab: Lab) -> str:
    """The draft of ``hpcgpu site new``, which is where a site's own file is looked for."""
    text, _ = hpcgpu(slurm_lab, "site", "new", "--name", "lab", site="none")
    slurm_lab.write(FILE, text)
    return text


def test_the_name_of_a_site_is_enough(slurm_lab: Lab, draft: str) -> None:
    """What sinfo and scontrol say: sbatch says whether it would take real GPUs, simulated ones have a cluster."""
    assert "lab.yaml is a site file: lab, slurm" in hpcgpu(slurm_lab, "site", "check", FILE)[0]
    assert any(line.startswith("lab ") for line in hpcgpu(slurm_lab, "site", "list")[0].splitlines())
    slurm_lab.write("script.py", "")
    script, _ = hpcgpu(slurm_lab, "plan", "--script", "--gpus", "8", "--walltime", "1h", "script.py")
    options = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")]
    for option in ("--nodes=2", "--ntasks-per-node=4", "--cpus-per-task=2", "--gpus-per-node=4", "--mem=8000M"):
        assert option in options
    plan, warned = hpcgpu(slurm_lab, "plan", "--gpus", "8", "--walltime", "01:00:00")
    assert "start: about" in plan, plan
    assert warned == ""
    done = slurm_lab.python(CLUSTER, env={"HPCGPU_SITE": "lab"})
    assert done.stdout.splitlines()[:1] == ["6 main"], done.stdout + done.stderr
    line = 1 + next(i for i, text in enumerate(draft.splitlines()) if text.startswith("defaults:"))
    assert re.search(rf"^  queue +main +site lab, ~/{re.escape(FILE)}:{line}$", done.stdout, re.M)


def test_from_pip_install_to_a_cluster_by_the_readme(slurm_lab: Lab, draft: str) -> None:
    """What its reader types who knows the machine's name, with the lab's for delta's; the lab has no accounts."""
    try:
        packages = slurm_lab.packages_of(".venv", "hatchling")
    except LabUnavailable as error:
        pytest.skip(str(error))
    slurm_lab.exec(slurm_lab.login, ["bash", "-c", VENV.format(packages=packages)], check=True)
    install = shlex.join(line("pip install ")).replace("[mpi-runtime]", "")  # "where your site has an MPI"
    pip = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    _typed(slurm_lab, install, folder=CHECKOUT, **pip)
    shown = [text.replace("delta", "lab").replace("--account m0000 ", "") for text in LINES]
    assert any(row.startswith("lab ") for row in _typed(slurm_lab, "hpcgpu site list").splitlines())
    plan = _typed(slurm_lab, next(text for text in shown if text.startswith("hpcgpu plan --site")))
    assert "  9 ranks and 8 workers; rank 0 has the scheduler" in plan.splitlines()
    assert "slurm would take the job" in _typed(slurm_lab, "hpcgpu doctor --site lab --gpus-per-node 4")
    code = next(text for kind, text in README if kind == "python")
    slurm_lab.write("named.py", code.replace("nodes=2,", 'site="lab", nodes=2,'))
    assert _typed(slurm_lab, "python named.py").splitlines()[-1] == "6"


def _typed(lab: Lab, command: str, folder: str = ".", **env: str) -> str:
    """Type a line in the venv of one's own; return what it prints."""
    argv = ["bash", "-c", f". ~/site/bin/activate && cd {folder} && {command}"]
    done = lab.exec(lab.login, argv, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
