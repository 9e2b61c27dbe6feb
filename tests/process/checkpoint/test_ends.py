"""The ends of clusters: what is finished and not on disk yet is written first, the dearest first."""

import signal
import subprocess
from pathlib import Path

import ranks
from waiting import scaled, until

from hpcgpu import Checkpoint

# Values that take long to pickle: the writers are behind. argv: folder, how the script ends
SCRIPT = """
import dask
from distributed import wait
from hpcgpu import Checkpoint

class Slow:
    def __init__(self, number):
        self.number = number
    def __reduce__(self):
        time.sleep(float(os.environ["SLOW"]))
        return Slow, (self.number,)

def make(number):
    time.sleep(number / 100)
    return Slow(number)

folder, how = sys.argv[1:]
client = Client()
checkpoint = Checkpoint(folder)
values = [checkpoint.persist(dask.delayed(make)(i, dask_key_name=f"value-{i}"), name=f"v{i}") for i in range(8)]
wait(values)
print("finished", flush=True)
if how == "retire":
    client.retire_workers(list(client.scheduler_info(n_workers=-1)["workers"])[:1])
elif how == "wait":
    time.sleep(600)
os._exit(0)  # the checkpoint is not closed
"""

HANGS = """
def end(*_):
    print("the script is told", flush=True)
    os._exit(0)

with Client() as client:
    client.wait_for_workers(2)
    pids = list(client.run(os.getpid).values())
signal.signal(signal.SIGTERM, end)
os.kill(pids[0], signal.SIGSTOP)
print("hangs", flush=True)
signal.pause()
"""


def started(tmp_path: Path, how: str, slow_s: float, workers: int = 1) -> tuple[subprocess.Popen[str], Path]:
    argv = ranks.command(
        ranks.script(tmp_path, SCRIPT), str(tmp_path / "run"), how, options=["--gpus", f"sim:{workers}"]
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
    return subprocess.Popen(argv, **pipes, text=True, env=ranks.environment(SLOW=str(slow_s))), tmp_path / "run"


def saved(folder: Path) -> list[str]:
    return [row.name for row in Checkpoint(folder).progress().rows if row.done]


def test_end_of_a_script_writes_what_is_finished(tmp_path: Path) -> None:
    process, folder = started(tmp_path, "end", 0.3)
    output, _ = process.communicate(timeout=scaled(120))
    assert process.returncode == 0, output
    assert saved(folder) == [f"v{i}" for i in range(8)], output


def test_cancelled_run_writes_the_dearest_and_says_what_lacks(tmp_path: Path) -> None:
    process, folder = started(tmp_path, "wait", 0.7)
    assert process.stdout
    until(lambda: "finished" in process.stdout.readline(), "all tasks have run", limit_s=120)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=scaled(120))
    assert process.returncode == 128 + signal.SIGTERM, output
    there = saved(folder)
    assert 0 < len(there) < 8
    assert "v7" in there, there  # the one that took longest
    print(output)
    assert "finished chunk" in output
    assert "the time, 4 s, was over" in output


def test_summary_that_awaits_a_hung_worker_delays_no_end(tmp_path: Path) -> None:
    argv = ranks.command(ranks.script(tmp_path, HANGS), options=["--gpus", "sim:2"])
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
    process = subprocess.Popen(argv, **pipes, text=True, env=ranks.environment())
    assert process.stdout
    until(lambda: "hangs" in process.stdout.readline(), "a worker hangs", limit_s=120)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=scaled(120))
    assert process.returncode == 128 + signal.SIGTERM, output
    assert 0 <= output.find("the script is told") < output.find("hpcgpu: summary: "), output


def test_workers_that_retire_write_what_is_finished(tmp_path: Path) -> None:
    process, folder = started(tmp_path, "retire", 0.3, workers=2)
    output, _ = process.communicate(timeout=scaled(120))
    assert process.returncode == 0, output
    assert saved(folder) == [f"v{i}" for i in range(8)], output
