"""``hpcgpu bind`` under PyTorch's own launcher."""

import os

import bound_ranks
import ranks

from hpcgpu.model import CpuSet


def test_ranks_of_torchrun_have_the_places_of_workers() -> None:
    allowed, folder = CpuSet(os.sched_getaffinity(0)), ranks.BIN
    line = [str(folder / "torchrun"), "--nproc-per-node", str(bound_ranks.count(allowed)), "--no-python"]
    done = ranks.run_command([*line, str(folder / "hpcgpu"), *bound_ranks.words(allowed, str(folder / "python"))])
    assert done.returncode == 0, done.stderr
    bound_ranks.check(done.stdout + done.stderr, os.uname().nodename, allowed)
