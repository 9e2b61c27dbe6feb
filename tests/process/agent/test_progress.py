"""``hpcgpu run --progress``: how many tasks are done."""

from __future__ import annotations

import re
from pathlib import Path

import ranks

SCRIPT = """
    from distributed import wait
    def work(i):
        if i == 7:
            raise ValueError("seven")
        return i
    if __name__ == "__main__":
        c = Client()
        wait(c.map(work, range(30), pure=False))
        print("done")
"""


def test_a_log_says_how_many_tasks_are_done(tmp_path: Path) -> None:
    """The last line is complete, however short the script was; results of the script go elsewhere."""
    done = ranks.run(ranks.script(tmp_path, SCRIPT), options=("--gpus", "sim:2", "--progress"))
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    said = re.findall(r"^hpcgpu: (tasks: .*)$", done.stderr, re.M)
    assert said[-1] == "tasks: 29 of 30 done, 1 failed"
