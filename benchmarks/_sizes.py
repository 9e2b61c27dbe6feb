"""How big the main job is, and what its cases are called; imports nothing that workers without work would not have."""

from __future__ import annotations

from dataclasses import dataclass, replace

MIB = 2**20
IDLE = "idle"
ALL_FITS = ", all fits"  # the same case with limits so high that nothing is spilled
MONITORED = ", monitors on"  # the same case with Dask's monitors of the process's memory
NAMES = (
    *("tall SVD", "low-rank SVD", "transpose-sum", "p2p shuffle", "hot and cold", "small tasks", IDLE),
    *(f"{name}{kind}" for kind in (ALL_FITS, MONITORED) for name in ("tall SVD", "transpose-sum", "hot and cold")),
)
# Of examples/libraries, with --only: they need the packages of make libraries.
EXAMPLES = ("optuna_study", "pandas_shuffle", "sklearn_joblib", "torch_ddp", "xarray_zarr", "xgboost_trees")
# Cases without arrays: where those would lie makes no difference.
OF_THE_HOST = ("p2p shuffle", "small tasks", IDLE, *EXAMPLES)


@dataclass(frozen=True)
class Size:
    """How big the job is.

    Attributes
    ----------
    workers : int
        How many, with one thread each.
    device_bytes, host_bytes : int
        Memory of a simulated GPU, and ``memory_limit``, of one worker.
    tall, low_rank, square : (int, int)
        Rows and rows of a block: of an array of 100 columns, of two square ones.
    frame : (int, int)
        Rows and partitions of the frame that is shuffled.
    hot, cold, block_bytes, steps : int
        Blocks that each step reads, which the devices can hold, and those of which each third step reads a quarter,
        which no memory can.
    tasks : int
        Small tasks.

    """

    workers: int
    device_bytes: int
    host_bytes: int
    tall: tuple[int, int]
    low_rank: tuple[int, int]
    square: tuple[int, int]
    frame: tuple[int, int]
    hot: int
    cold: int
    block_bytes: int
    steps: int
    tasks: int

    def all_fits(self) -> Size:
        """Return the same job with limits above all its data; ``full`` takes 22 GiB of the node, as limits go."""
        return replace(self, device_bytes=6 * self.device_bytes, host_bytes=3 * self.host_bytes)


SIZES = {
    # as hpcgpu demo: 1.6 GB, and all factors kept, on GPUs with 1 GiB
    "full": Size(
        workers=4,
        device_bytes=256 * MIB,
        host_bytes=700_000_000,
        tall=(2_000_000, 10_000),
        low_rank=(10_000, 2_000),
        square=(20_000, 2_000),
        frame=(20_000_000, 40),
        hot=30,
        cold=200,
        block_bytes=16 * MIB,
        steps=12,
        tasks=20_000,
    ),
    "quick": Size(
        workers=4,
        device_bytes=64 * MIB,
        host_bytes=175_000_000,
        tall=(500_000, 10_000),
        low_rank=(5_000, 1_000),
        square=(10_000, 1_000),
        frame=(2_000_000, 16),
        hot=30,
        cold=200,
        block_bytes=4 * MIB,
        steps=12,
        tasks=4_000,
    ),
    "smallest": Size(
        workers=2,
        device_bytes=8 * MIB,
        host_bytes=10_000_000,
        tall=(40_000, 2_000),
        low_rank=(600, 200),
        square=(2_000, 250),
        frame=(40_000, 4),
        hot=16,
        cold=60,
        block_bytes=MIB // 2,
        steps=6,
        tasks=200,
    ),
}
