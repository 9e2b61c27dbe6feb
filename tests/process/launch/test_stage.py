"""A launch whose ranks, scheduler and workers run from a copy of the Python environment."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import ranks
from waiting import scaled, until

# Where each process has its Python and its modules.
SCRIPT = """
import json
def places(dask_worker=None):
    import distributed, hpcgpu, sys
    return [sys.prefix, sys.executable, distributed.__file__, hpcgpu.__file__]
with Client() as c:
    c.wait_for_workers(2)
    everywhere = [places(), c.run_on_scheduler(places), *c.run(places).values(), *c.run(places, nanny=True).values()]
    print(json.dumps(everywhere))
sys.exit(3)
"""


@pytest.mark.timeout(600)
def test_all_processes_of_a_staged_run_are_from_the_copy(tmp_path: Path) -> None:
    path, node = ranks.script(tmp_path, SCRIPT), tmp_path / "node"
    node.mkdir()
    words = ("launch", "--launcher", "mpirun", "--gpus", "sim:2x16MiB", "--environment", "stage", str(path))
    # not in this checkout, whose modules come first there
    env = ranks.environment(TMPDIR=str(node), HOME=os.environ["HOME"])
    argv = [str(ranks.BIN / "hpcgpu"), *words]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=scaled(400), env=env, cwd=tmp_path, check=False)
    assert done.returncode == 3, done.stderr
    everywhere = json.loads(done.stdout)
    assert len(everywhere) == 6
    folder = everywhere[0][0].removesuffix(f"/root{sys.prefix}")
    assert Path(folder).parent == node
    assert all(place.startswith(f"{folder}/root/") for places in everywhere for place in places)
    assert "its own place" not in done.stderr
    until(lambda: not list(node.iterdir()), "nothing is left on the node")
    archives = Path(os.environ["HOME"], ".hpcgpu/environments").glob("*.tar*")  # .zst where that program is
    (archive,) = (path for path in archives if path.suffix != ".json")
    assert archive.stat().st_mode & 0o777 == 0o600
