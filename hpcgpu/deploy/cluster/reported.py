"""A cluster object's reports: bindings, memory, and a summary of what was used."""

from __future__ import annotations

from typing import Any

from distributed.core import Status
from distributed.deploy.cluster import Cluster

from hpcgpu.deploy import workers
from hpcgpu.deploy.cluster.parts import Parts
from hpcgpu.report.summary import Summary


class ReportedCluster(Cluster):
    """distributed's interface to a cluster, with what people ask about GPUs."""

    parts: Parts  # for the classes of hpcgpu; attributes for people have a name of their own
    scheduler_comm: Any  # distributed's, as scheduler_info
    scheduler_info: Any

    def bindings(self) -> Any:  # a coroutine of an asynchronous cluster
        """Return what each worker is tied to, planned and actual: read back from the kernel, for all threads.

        Returns
        -------
        hpcgpu.report.workers.Bindings
            It prints as a table; an awaitable of it where the cluster is asynchronous.

        """
        self.parts.must_run()
        return self.sync(workers.read_bindings, self.scheduler_comm)

    def memory(self) -> Any:
        """Return the memory of each worker now: device, host, what is spilled, and what has been moved how fast.

        Returns
        -------
        hpcgpu.report.memory.Memory
            It prints as a table; an awaitable of it where the cluster is asynchronous.

        """
        self.parts.must_run()
        return self.sync(workers.read_memory, self.scheduler_comm)

    def trim_memory(self) -> Any:
        """Have all workers give free memory back to the kernel; see :func:`hpcgpu.trim_memory`.

        Returns
        -------
        dict of str to int
            Bytes given back, by worker; an awaitable of it where the cluster is asynchronous.

        """
        self.parts.must_run()
        return self.sync(self._trim)

    async def _trim(self) -> Any:
        with self.parts.progress.waiting("the workers give free memory back"):
            return await workers.trim(self.scheduler_comm)

    def summary(self) -> Any:
        """Return what was used: GPU hours, busy share, bytes moved and peaks by tier, restarts; and what to ask for.

        It answers after :meth:`close`, too, with the figures of then.

        Returns
        -------
        hpcgpu.report.summary.Summary
            It prints as a few lines, ``.as_dict()`` and ``.as_json()`` have the figures; an awaitable of it where the
            cluster is asynchronous.

        Raises
        ------
        JobError
            The scheduler was never reached, or is lost.

        """
        asks = self.asynchronous or self._scheduler_answers
        return self.sync(self._summary) if asks else self.parts.answers.summary()

    @property
    def _scheduler_answers(self) -> bool:
        return bool(self.status == Status.running and self.scheduler_comm is not None)

    async def _summary(self) -> Summary:
        if self._scheduler_answers:
            await self.parts.answers.ask_summary(self.scheduler_comm)
        return self.parts.answers.summary()
