"""No process of a cluster reads or writes a file on its event loop: a file server may be silent for minutes."""

import os
import sys
from pathlib import Path

import ranks
from waiting import scaled

# Python imports this module in each process at its start. It notes each path that is opened, made, listed or removed
# while an event loop runs in the thread, with the first caller outside the standard library, where that is ours.
AUDIT = """
import os, sys
from asyncio import events

EVENTS = {"open", "os.mkdir", "os.listdir", "os.scandir", "os.remove", "os.rename", "os.rmdir", "os.utime"}
KERNELS = ("/proc", "/sys", "/dev")
NOTES = os.environ["NOTES"]

def note(event, args):
    if event not in EVENTS or type(args[0]) is not str or args[0].startswith((*KERNELS, NOTES)):
        return
    if events._get_running_loop() is None:
        return
    frame, callers = sys._getframe(1), []
    while frame:
        code = frame.f_code
        if "importlib" in code.co_filename:
            return
        if "/hpcgpu/" in code.co_filename or "/site-packages/" in code.co_filename:
            callers.append((code.co_filename, code.co_name))
        frame = frame.f_back
    if callers and "/site-packages/" not in callers[0][0]:
        fd = os.open(NOTES, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(fd, (" < ".join(f"{file.rpartition('/')[2]}:{name}" for file, name in callers[:5]) + "\\n").encode())
        os.close(fd)

sys.addaudithook(note)
"""
SCRIPT = """
import os
from distributed import Client
from hpcgpu import LocalGPUCluster

if __name__ == "__main__":
    with LocalGPUCluster(gpus="sim:1", log_directory=os.environ["LOGS"]) as cluster, Client(cluster) as client:
        pid = client.run(os.getpid)
        client.submit(os._exit, 1, retries=0).exception()  # a nanny removes its worker's folder
        client.wait_for_workers(1)
        assert client.submit(sum, [1, 2]).result() == 3
        print("done")
"""
# Before a worker serves its loop has nothing else to do; and the memory of simulated GPUs is in files.
ALLOWED = ("disk.py:__init__", "array.py:")


def test_no_file_is_touched_on_an_event_loop(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(AUDIT)
    (tmp_path / "script.py").write_text(SCRIPT)
    notes = tmp_path / "notes"
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    env = {"PYTHONPATH": path, "NOTES": str(notes), "LOGS": str(tmp_path / "logs")}
    done = ranks.run_command([sys.executable, str(tmp_path / "script.py")], env, scaled(120))
    assert done.stdout == "done\n", done.stderr
    seen = notes.read_text().splitlines()
    assert any("array.py:" in line for line in seen), "the hook is there"
    assert [line for line in seen if not any(name in line for name in ALLOWED)] == []
