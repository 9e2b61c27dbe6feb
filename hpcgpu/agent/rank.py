"""One rank, from its start to its end: image, meeting, layout, then leader or follower."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcgpu.agent import meeting, node
from hpcgpu.agent.follower import dismiss, follow
from hpcgpu.errors import HpcGpuError, LaunchError, WorldError
from hpcgpu.host import process
from hpcgpu.launch.environment import is_isolated, read_allocation
from hpcgpu.model import RunDocument

if TYPE_CHECKING:
    from hpcgpu.agent.image import Image
    from hpcgpu.agent.scheduling import Scheduling
    from hpcgpu.model import Layout

Records = list[dict[str, Any]]


class Rank:
    """The process as one of the world's ranks."""

    def __init__(self, run: RunDocument, environ: Mapping[str, str]) -> None:
        self._run, self._environ = run, environ
        self._allocation = read_allocation(environ)
        self._facts = self._allocation.rank
        self._host = self._allocation.node_name or socket.gethostname()
        # Nobody else can fork for a rank with devices of its own, nor where nobody says who is where.
        own_devices = is_isolated(environ) and run.settings.gpus is None
        self._isolated = self._facts.local_rank is None or own_devices
        self._scheduling: Scheduling | None = None
        self._folder: Path | None = None
        self._failure = ""

    def run(self) -> int:
        """Meet the others, then do this rank's part until the run ends; return the exit code."""
        from hpcgpu.plan.layout import plan_layout

        rank = self._facts.rank
        if self._facts.launcher != "none":
            # SIGKILL of mpirun leaves its ranks alive (Open MPI 5.0.11)
            process.die_with_parent(os.getppid(), signal.SIGTERM)
        with contextlib.ExitStack() as stack:
            image = None
            try:
                if self._isolated or self._facts.local_rank == 0:
                    image = stack.enter_context(self._make_image())
                    self._start_scheduler(image)
            except HpcGpuError as e:
                self._failure = str(e)  # said in the meeting, or the others would wait for this rank
            records = self._meet(image)
            each = self._run.settings.workers_per_gpu
            layout = plan_layout([node.rank_record(r) for r in records], self._allocation.node_count, each)
            home = layout.node_of(rank)
            if home.leader != rank:
                return follow(rank, records[home.leader]["door"])
            if image is None:
                image = stack.enter_context(self._make_image(after_mpi=True))
            return self._lead(image, records, layout)

    def _make_image(self, *, after_mpi: bool = False) -> Image:
        """Make the leader's image; followers, of which there are many, do without the imports that it takes."""
        from hpcgpu.agent.image import Image

        settings = self._run.settings
        return Image.make(settings.local_directory, simulated=settings.gpus is not None, after_mpi=after_mpi)

    def _start_scheduler(self, image: Image) -> None:
        from hpcgpu.agent.scheduling import Scheduling

        if self._facts.rank == 0:
            self._scheduling = Scheduling(self._run, image, local=self._all_on_one_node())

    def _meet(self, image: Image | None) -> Records:
        """Return what all ranks say of themselves; raise WorldError when one of them has failed."""
        settings = self._run.settings
        if self._facts.size == 1:
            records = [self._record(image)]
        elif settings.rendezvous == "file":
            self._folder = meeting_folder(self._run, self._environ)
            own = self._record(image)
            records = meeting.meet_by_files(own, self._facts, self._folder, settings.death_timeout_s)
        else:
            records = meeting.meet_by_mpi(lambda: self._record(image), self._facts, settings.death_timeout_s)
        for record in records:
            if "failure" in record:
                where = f"rank {record['rank']} on {record['host']}: " if len(records) > 1 else ""
                raise WorldError(f"{where}{record['failure']}")
        return records

    def _record(self, image: Image | None) -> dict[str, Any]:
        """Return what this rank says of itself."""
        record = {"rank": self._facts.rank, "host": self._host}
        try:
            if self._failure:
                raise LaunchError(self._failure)
            return record | {
                "isolated": self._isolated,
                "door": image.door.path if image else "",
                "scheduler": self._scheduling.record() if self._scheduling else None,
                **node.granted(self._run.settings, self._environ),
            }
        except HpcGpuError as e:
            return record | {"failure": str(e)}

    def _all_on_one_node(self) -> bool:
        facts = self._facts
        one_step = facts.launcher == "srun" and self._environ.get("SLURM_STEP_NUM_NODES") == "1"
        # without a batch system the cluster object that started the ranks is on this machine, too
        elsewhere = self._run.shape == "gang" and self._allocation.batch != "local"
        return not elsewhere and (facts.size in (1, facts.local_size) or one_step)

    def _lead(self, image: Image, records: Records, layout: Layout) -> int:
        """Run this node's workers until the end; on rank 0 the whole run."""
        import asyncio

        from hpcgpu.agent.head import Head
        from hpcgpu.agent.leader import Leader, Post, report_failure

        rank, settings = self._facts.rank, self._run.settings
        home = layout.node_of(rank)
        guests = image.door.receive(len(home.ranks) - 1, settings.death_timeout_s)
        try:
            try:
                workers = node.plan(self._run, self._environ, str(image.scratch.path), records, layout, rank)
            except HpcGpuError as e:
                if rank:
                    asyncio.run(report_failure(records[0]["scheduler"], f"{self._host}: {e}"))
                raise
            os.sched_setaffinity(image.zygote.pid, os.sched_getaffinity(0))
            process.hide_gpus(records[0]["scheduler"]["protocol"])
            post = Post(
                run=self._run,
                environ=self._environ,
                zygote=image.zygote,
                scheduler=records[0]["scheduler"],
                workers=workers,
                outputs={g.rank: (g.stdout, g.stderr) for g in guests},
            )

            async def lead() -> int:
                if self._scheduling is None:
                    return await Leader(post).run()
                return await Head(post, self._scheduling, layout, image.scratch.path, self._allocation).run()

            return asyncio.run(lead())
        finally:
            dismiss(guests)
            if self._folder and rank == 0:
                shutil.rmtree(self._folder, ignore_errors=True)


def meeting_folder(run: RunDocument, environ: Mapping[str, str]) -> Path:
    """Return the folder of this run's meeting: the document's, or one that this launch alone has.

    Raises
    ------
    LaunchError
        Nothing in the environment is this launch's alone.

    """
    if run.meeting:
        return Path(run.meeting) / "ranks"
    keys = (("SLURM_JOB_ID", "SLURM_STEP_ID"), ("PBS_JOBID",), ("PMIX_NAMESPACE",))
    for names in keys:
        if all(n in environ for n in names):
            restart = environ.get("SLURM_RESTART_COUNT", "0")
            key = ".".join([*(environ[n] for n in names), restart]).replace("/", "_")
            return Path.home() / ".hpcgpu" / "meetings" / key
    raise LaunchError("rendezvous='file' needs a batch job or 'hpcgpu launch': nothing tells this launch from another")
