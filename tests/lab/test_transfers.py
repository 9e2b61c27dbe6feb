"""A job is preempted or killed while its workers exchange large frames: no wrong byte, no hang, nothing is left."""

import pytest
from faults import Faulty, faulty
from lab import PATIENCE_S, Lab
from streams import STREAM
from waiting import until

pytestmark = pytest.mark.timeout(400)


def end(run: Faulty, how: str, job: str) -> None:
    """Have a running job end: Slurm sends SIGTERM, and SIGKILL 5 s later; or SIGKILL to all its processes at once."""
    if how == "preempted":
        run.lab.submit("#!/bin/bash\nsleep 5\n", "-phigh", f"-w{run.node_of(job)}", "--exclusive")
        until(lambda: run.lab.job(job)["Restarts"] == "1", "it was preempted", limit_s=PATIENCE_S)
    else:
        run.lab.exec(run.lab.login, ["scancel", "--full", "--signal=KILL", job], check=True)
        run.lab.wait_job(job)


def rounds(lab: Lab) -> int:
    return int(lab.exec(lab.login, ["cat", "rounds"]).stdout or 0)


@pytest.mark.parametrize("how", ["preempted", "killed"])
def test_bytes_between_nodes_are_right_or_computed_again(slurm_lab: Lab, how: str) -> None:
    slurm_lab.exec(slurm_lab.login, ["rm", "-f", "stop", "rounds"])
    with faulty(slurm_lab, jobs=2, scheduler="here", queue="low", gpus="sim:2", cores_per_gpu=4) as run:
        run.do(STREAM)
        job = run.members()[0]
        run.do.send(f"stream(client, sorted(client.scheduler_info(n_workers=-1)['workers']), {PATIENCE_S})")
        until(lambda: rounds(slurm_lab) > 1, "frames are under way", limit_s=PATIENCE_S)
        end(run, how, job)
        before = rounds(slurm_lab)
        until(lambda: rounds(slurm_lab) > before + 1, "the others go on", limit_s=PATIENCE_S)
        slurm_lab.write("stop", "")
        story = run.do.answer(PATIENCE_S)
        assert (story["wrong"], story["errors"]) == ([], [])
        assert all(story["moved"]), "frames came by data connections, and within a node by copies"
        if how == "preempted":
            run.start_at_once(job)
        run.whole_again()

    def left() -> list[str]:
        folders = [slurm_lab.exec(node, ["sh", "-c", "ls -d /tmp/hpcgpu-*"]).stdout for node in slurm_lab.nodes]
        return " ".join(folders).split()

    until(lambda: left() == [], "no folder is left on a node", shown=left)
