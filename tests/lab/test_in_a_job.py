"""Clusters from within a job: a notebook's kernels are clients of their job's cluster, and may submit another one."""

import pytest
from lab import CHECKOUT, Lab, LabUnavailable
from waiting import scaled, until

CELL = """
from distributed import Client
from hpcgpu import SLURMGPUCluster
with Client() as own:
    options = dict(gpus="sim:2", ranks="node", walltime="10m", dashboard=False)
    with SLURMGPUCluster(**options) as cluster, Client(cluster) as client:
        client.wait_for_workers(2)
        counts = [len(c.scheduler_info(n_workers=-1)["workers"]) for c in (own, client)]
        print(*counts, client.submit(sum, [1, 2]).result(), own.submit(sum, [3, 4]).result())
"""
# Runs a cell in a new kernel of the server, on its node, and shuts the server down.
NOTEBOOK = """
import json, sys, urllib.request, websocket
base, _, token = open(sys.argv[1]).read().strip().partition("?token=")
def request(path, data):
    asked = urllib.request.Request(base + path, data=data, headers={"Authorization": "token " + token})
    return urllib.request.urlopen(asked, timeout=30).read()
kernel = json.loads(request("api/kernels", b"{}"))["id"]
address = base.replace("http", "ws", 1) + f"api/kernels/{kernel}/channels"
channel = websocket.create_connection(address, timeout=150, header=["Authorization: token " + token])
header = {"msg_id": "1", "msg_type": "execute_request", "username": "", "session": "1", "version": "5.3"}
message = {"header": header, "parent_header": {}, "metadata": {}, "channel": "shell"}
channel.send(json.dumps({**message, "content": {"code": sys.stdin.read()}}))
while (said := json.loads(channel.recv()))["msg_type"] != "execute_reply":
    for text in (said["content"].get("text"), *said["content"].get("traceback", ())):
        print(text or "", end="", flush=True)
channel.close()
request("api/shutdown", b"")
"""


@pytest.fixture
def jupyter(slurm_lab: Lab) -> Lab:
    """The lab with the checkout's Jupyter behind the packages of its own Python."""
    base = "$(ls -d /opt/venv/lib/python3*/site-packages)"
    try:
        slurm_lab.lend(".venv", "jupyter", ("jupyter_server", "ipykernel", "websocket"), below=base)
    except LabUnavailable as error:
        pytest.skip(str(error))
    return slurm_lab


@pytest.mark.timeout(400)
def test_a_notebook_of_the_template_may_submit_a_cluster(jupyter: Lab) -> None:
    """The first job has a GPU, and the second asks for none: nothing of the first one's may reach it."""
    lab = jupyter
    lab.write("notebook.py", NOTEBOOK)  # Jupyter has a module of this name, which must not be this one
    submit = 'PATH=~/jupyter/bin:$PATH exec sbatch --parsable --output=jupyter.out "$@"'
    options = ("--nodes=1", "--ntasks-per-node=1", "--gpus-per-node=1", "--mem-per-cpu=500M", "--time=10")
    template = (f"{CHECKOUT}/jobscripts/slurm-jupyter.sbatch", "--gpus", "sim:1", "--no-dashboard")
    job = lab.exec(lab.login, ["sh", "-c", submit, "sh", *options, *template], check=True).stdout.strip()

    def address() -> str:
        log = lab.exec(lab.login, ["cat", "jupyter.out"]).stdout
        assert lab.job(job)["JobState"] in ("PENDING", "CONFIGURING", "RUNNING"), log
        return log.partition("its address: cat ")[2].partition("\n")[0] if "is running at" in log else ""

    until(lambda: bool(address()), "Jupyter listens", limit_s=240, every_s=0.5)
    argv = ["/home/hpc/jupyter/bin/python", "notebook.py", address()]
    done = lab.exec(lab.job(job)["BatchHost"], argv, stdin=CELL, timeout=scaled(150))
    assert done.stdout.splitlines()[-1:] == ["1 2 3 7"], done.stdout + done.stderr
    assert lab.wait_job(job)["ExitCode"] == "0:0"
