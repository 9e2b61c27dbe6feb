"""What tests of jobs that end in the middle share: a script outside of its job, what ``examples/resume.py`` prints."""

import re

CHUNKS = 24
BEGUN = re.compile(rf"^(\d+) of {CHUNKS} chunks are there$", re.M)
# The script of a client whose cluster comes back as another scheduler: `run()`, after `cluster =`. The first job has
# time for two thirds of the chunks, the second one for the rest. The futures end with their scheduler; a new client
# waits until the cluster is back.
OUTSIDE = """
import os, time
from concurrent.futures import CancelledError
from distributed.client import ClosedClientError
import dask.array as da, numpy as np
from hpcgpu import Checkpoint, JobError
errors = []
def step(block):
    time.sleep(8)
    with open("outside.ran", "a") as file:
        print(int(block[0]), file=file)
    return block * 2.0
def run():
    x = da.arange(24, chunks=1).map_blocks(step, dtype=float, meta=np.empty(0))
    while True:
        try:
            with Client(cluster) as client:
                client.wait_for_workers(2)
                total = float(checkpoint.persist(x, name="x").sum().compute())
                open("outside.through", "w").close()
                return total
        except (JobError, CancelledError, ClosedClientError, OSError) as e:
            errors.append(repr(e))
            print(repr(e), flush=True)
            time.sleep(1)
os.chdir("requeue")
checkpoint = Checkpoint("outside")
"""
