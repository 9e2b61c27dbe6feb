"""What a script begins with whose ranks are killed: their pids, who works and under whom, and waiting for a fact."""

BEGIN = """
import json
c = Client()
pids = json.load(open(sys.argv[1]))

def addresses():
    return {w["name"]: a for a, w in c.scheduler_info(n_workers=-1)["workers"].items()}

def wait(fact):
    end = time.monotonic() + 100
    while not fact():
        assert time.monotonic() < end
        time.sleep(0.02)

def wait_until_said(rank, words):
    said = os.path.join(os.path.dirname(sys.argv[1]), f"err-{rank}")
    wait(lambda: words in open(said).read())

def kill(rank):
    os.kill(pids[rank], signal.SIGKILL)

def slow(x):
    time.sleep(0.02)
    return x + 1
"""
