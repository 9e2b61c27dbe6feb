"""Workers that send each other large frames until they are told to stop; what came of it."""

# Code of a client: it may be in this process, or in the lab's. A file ``stop`` in its folder ends it.
STREAM = """
import os
import numpy as np

def make(i):
    return np.arange(i, i + 2**19).view(np.uint8)  # 4 MiB

def total(*arrays):
    return sum(int(a.sum(dtype=np.int64)) for a in arrays)

def moved():
    from hpcgpu.deploy.network.node_copies import this_process
    return [this_process.cut_bytes, this_process.copied_bytes]

def stream(client, addresses, limit_s):
    # each worker makes arrays, which all others add up
    right, out = total(*map(make, range(12))), dict(rounds=0, wrong=[], errors=[], moved=[])
    while not os.path.exists("stop"):
        sums = []
        for sender in addresses:
            arrays = client.map(make, range(12), workers=[sender], allow_other_workers=True, pure=False)
            others = [address for address in addresses if address != sender]
            sums += [client.submit(total, *arrays, workers=[a], allow_other_workers=True, pure=False) for a in others]
        for each in sums:
            try:
                if each.result(timeout=limit_s) != right:
                    out["wrong"].append(each.result())
            except Exception as e:
                out["errors"].append(f"{type(e).__name__}: {e}")
        out["rounds"] += 1
        with open("rounds", "w") as file:
            file.write(str(out["rounds"]))
    out["moved"] = [max(way) for way in zip(*client.run(moved).values())]
    return out
"""
