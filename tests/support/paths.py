"""Where things of this checkout are."""

from pathlib import Path

SUPPORT = Path(__file__).parent
ROOT = SUPPORT.parents[1]
TESTS = ROOT / "tests"
DATA = TESTS / "data"
TOPOLOGIES = DATA / "topology"
BATCH = DATA / "batch"
PACKAGE = ROOT / "hpcgpu"
