"""What a start reads from the file server of the Python environment, as imports: look-ups follow from them."""

from collections import Counter
from pathlib import Path

import ranks

COUNT = """
import os, sys

def count(event, arguments):
    if event == "import":
        file = os.open(os.environ["IMPORTS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, f"{os.getpid()} {arguments[0]}\\n".encode())
        os.close(file)

sys.addaudithook(count)
"""
# Ceilings of imports: of `hpcgpu launch`, of a node's leader, and of each process that it forks, scheduler and workers
# (331, 898 and 1 with Python 3.11 and distributed 2026.8). Each is three or four look-ups of names, and those of
# libraries come on top: benchmarks/startup.py counts all by strace.
LAUNCH, NODE, FORKED = 345, 930, 3


def test_start_with_a_rank_per_node_imports_few_modules(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(COUNT)
    (tmp_path / "script.py").write_text("import os; os._exit(0)\n")
    options = ("--gpus", "sim:2x16MiB", "--launcher", "mpirun", "--ranks", "node")
    argv = [str(ranks.BIN / "hpcgpu"), "launch", *options, str(tmp_path / "script.py")]
    done = ranks.run_command(argv, {"PYTHONPATH": str(tmp_path), "IMPORTS": str(tmp_path / "imports")})
    assert done.returncode == 0, done.stderr
    imports = [line.split() for line in (tmp_path / "imports").read_text().splitlines()]
    counts = Counter(pid for pid, _ in imports)
    node, launch, *forked = sorted(counts.values(), reverse=True)
    assert (node <= NODE, launch <= LAUNCH, max(forked) <= FORKED) == (True, True, True), counts
    assert {"prometheus_client", "http.server", "bokeh"} & {module for _, module in imports} == set()
