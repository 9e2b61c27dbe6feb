"""Jobs that come and go on a real Slurm: elements of an array that join, and leave with what they hold."""

from __future__ import annotations

import textwrap

import pytest
from lab import Lab

# A head on the login node, as shape="elastic" with scheduler="here" has it, and two elements of an array.
CLUSTER = """
    import json, os, subprocess, sys, time
    from dataclasses import replace
    from pathlib import Path
    from distributed import Client
    from hpcgpu.batch import get
    from hpcgpu.config import document
    from hpcgpu.deploy.network import scheduler_file, lease
    from hpcgpu.deploy.jobs.job_plan import plan_job
    from hpcgpu.deploy.network.tls import security
    from hpcgpu.model import RunDocument, Settings

    def wait(condition):
        end = time.monotonic() + 100
        while not (value := condition()):
            assert time.monotonic() < end
            time.sleep(0.1)
        return value

    def names():
        return sorted(w["name"] for w in client.scheduler_info(n_workers=-1)["workers"].values())

    def ended(element):
        return wait(lambda: [w for w in os.popen(f"scontrol show job {element}").read().split()
                             if w.startswith("JobState=") and w != "JobState=RUNNING" and "COMPLETING" not in w])

    home = Path.home() / "runs-of-members"
    folder = scheduler_file.make_folder(home)
    lease.detach(folder)
    settings = Settings(gpus="sim:2", walltime_s=3600)
    run = RunDocument(settings, "member", folder=str(folder))
    spec, system = plan_job(run, None, "slurm")
    script = system.script(replace(spec, count=2, exit_file=""))
    head = subprocess.Popen([sys.executable, "-m", "hpcgpu.agent", document.render(replace(run, shape="head"))])
    sbatch = subprocess.run(system.submit(script, spec).argv, input=script, capture_output=True, text=True)
    array = sbatch.stdout.strip()
    contact = wait(lambda: scheduler_file.read(folder))
    client = Client(contact.addresses[0], security=security(contact.certificate))
    wait(lambda: len(names()) == 4)
    joined = names()
    by_name = {w["name"]: a for a, w in client.scheduler_info(n_workers=-1)["workers"].items()}
    data = [client.scatter({f"d{i}": [i] * 1000}, workers=[by_name[f"{array}_0-{i}"]])[f"d{i}"] for i in range(2)]
"""
END = """
    client.sync(client.scheduler.hpcgpu_lease, goodbye=True)
    print("FACTS", json.dumps(dict(array=array, joined=joined, left=left, kept=kept, state=state, head=head.wait(60),
                                   other=ended(f"{array}_1"))))
"""


@pytest.mark.parametrize(
    ("go", "state"),
    [("scancel --batch --signal=USR1 {array}_0", "COMPLETED"), ("scancel {array}_0", "CANCELLED")],
    ids=["warned", "cancelled"],
)
def test_an_element_that_must_go_hands_its_data_over(slurm_lab: Lab, go: str, state: str) -> None:
    code = f"""
    os.system(f"{go}")
    wait(lambda: len(names()) == 2)
    left, state = names(), ended(f"{{array}}_0")
    kept = [sum(value) for value in client.gather(data)]
"""
    facts = slurm_lab.facts("".join(map(textwrap.dedent, (CLUSTER, code, END))))
    array = facts["array"]
    assert facts["joined"] == [f"{array}_{element}-{i}" for element in (0, 1) for i in (0, 1)]
    assert facts["left"] == [f"{array}_1-{i}" for i in (0, 1)]
    assert facts["kept"] == [0, 1000]
    assert facts["state"] == [f"JobState={state}"]
    assert (facts["head"], facts["other"]) == (0, ["JobState=COMPLETED"])
