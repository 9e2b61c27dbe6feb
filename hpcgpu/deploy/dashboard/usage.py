"""The scheduler's record of its workers' usage, for the summary, the page and the metrics."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any, TypeVar

from distributed import Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin

from hpcgpu.deploy.dashboard.worker_metrics import ANSWER, ASK, KEY
from hpcgpu.host import log
from hpcgpu.model.worker_names import by_number
from hpcgpu.report.energy import EnergyUse
from hpcgpu.report.summary import Summary, sum_up
from hpcgpu.report.workers import FOLDED, WorkerFacts, by_node, read_facts
from hpcgpu.supervise import reason_of

# How long workers may take to answer; without an answer their last heartbeats count, which are 0.5 to 3 s apart.
_ANSWER_S = 1.0
_JSON = "summary as JSON: "  # for grep
_HOLD_S = 0.01  # of the scheduler's loop at once, for the facts of thousands of workers
Item = TypeVar("Item")


async def in_parts(items: Iterable[Item]) -> list[Item]:
    """Return all items of an iterator that computes them, and let others use the event loop meanwhile."""
    out, begin_s = list[Item](), time.monotonic()
    for item in items:
        out.append(item)
        if time.monotonic() > begin_s + _HOLD_S:
            await asyncio.sleep(0)
            begin_s = time.monotonic()
    return out


class UsagePlugin(SchedulerPlugin):
    """The memory, time and energy that each worker was given and used.

    ``walltime_s`` is the requested time limit; ``carbon_g_per_kwh`` is the setting.
    """

    name = "hpcgpu-usage"

    def __init__(
        self,
        scheduler: Scheduler,
        walltime_s: int | None = None,
        carbon_g_per_kwh: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler, self._walltime_s, self._clock = scheduler, walltime_s, clock
        self._carbon_g_per_kwh, self._energy = carbon_g_per_kwh, EnergyUse()
        self._begin_s = clock()
        self._live: dict[str, tuple[Any, float]] = {}  # distributed's WorkerState, and since when
        self._ended: list[WorkerFacts] = []
        self._began = Counter[str]()
        self._by_node: dict[str, set[str]] = {}  # live workers
        self._silent: set[str] = set()  # workers that were asked and have not answered
        self._answered = asyncio.Event()

    @classmethod
    def attach(cls, scheduler: Scheduler, walltime_s: int | None, carbon_g_per_kwh: float | None = None) -> None:
        """Add the plugin, and its request handlers, to a scheduler that has not been started."""
        plugin = cls(scheduler, walltime_s, carbon_g_per_kwh)
        scheduler.add_plugin(plugin)
        scheduler.handlers["hpcgpu_summary"] = plugin.fresh_summary
        scheduler.stream_handlers[ANSWER] = plugin.take_answer

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """Begin a life; distributed calls this when a worker has registered."""
        state = scheduler.workers[worker]
        self._live[worker] = state, self._clock()
        self._began[str(state.name)] += 1
        here = self._by_node.setdefault(_place(state)[0], set())
        self._note_energy(here)  # the new worker's count begins where the others' is now
        here.add(worker)
        self._note_energy((worker,))

    def remove_worker(self, scheduler: Scheduler, worker: str, **_: object) -> None:
        """End a life; distributed calls this when a worker is gone."""
        if worker in self._live:
            self._note_energy((worker,))
            life = self._live.pop(worker)
            node, pci = _place(life[0])
            self._energy.leave(worker, node, pci)
            self._by_node[node].discard(worker)
            self._ended.append(self._facts(*life))
            self._silent.discard(worker)
            if not self._silent:
                self._answered.set()

    @property
    def count(self) -> int:
        """The number of workers."""
        return len(self._live)

    async def gpus(self) -> list[WorkerFacts]:
        """Return the last heartbeat's facts of each worker with a GPU, in the order of nodes and numbers."""
        workers = await in_parts(self._facts(*life) for life in tuple(self._live.values()))
        return sorted((facts for facts in workers if facts.gpu), key=lambda facts: by_number(facts.name))

    async def rows(self) -> tuple[list[WorkerFacts], list[WorkerFacts]]:
        """Return the facts of :meth:`gpus`, and those that are shown: of many GPUs one row for each node."""
        gpus = await self.gpus()
        return gpus, await in_parts(by_node(gpus)) if len(gpus) > FOLDED else gpus

    def energy(self) -> EnergyUse:
        """Return the energy until the workers' last heartbeats, also of workers that are gone."""
        self._note_energy(self._live)
        return self._energy

    def _note_energy(self, addresses: Iterable[str]) -> None:
        for address in addresses:
            worker, _ = self._live[address]
            self._energy.note(address, *_place(worker), worker.metrics.get(KEY, {}))

    def _facts(self, worker: Any, begin_s: float) -> WorkerFacts:
        """Return a worker's facts at its last heartbeat; of one that hpcgpu has not started, its name and time only."""
        end_s, metrics = self._clock(), worker.metrics
        now: dict[str, Any] = metrics.get(KEY, {})
        return read_facts(
            str(worker.name),
            worker.extra.get(KEY, {}),
            {**now, "busy_s": min(now.get("busy_s", 0.0), end_s - begin_s)},
            device_used_bytes=metrics.get("gpu_memory_used"),
            utilisation_percent=metrics.get("gpu_utilization"),
            restarts=max(0, self._began[str(worker.name)] - 1),
            begin_s=begin_s,
            end_s=end_s,
        )

    def summary(self) -> Summary:
        """Return the run's usage until the workers' last heartbeats."""
        lives = [*self._ended, *(self._facts(*life) for life in self._live.values())]
        wall_s = self._clock() - self._begin_s
        return sum_up(lives, wall_s, self._walltime_s, self.energy(), self._carbon_g_per_kwh)

    async def fresh_summary(self) -> dict[str, Any]:
        """Ask the workers for their sums, and return the facts of the summary (``hpcgpu_summary``)."""
        self._silent = set(self._live)
        self._answered.clear()
        # Question and answer use the connections that are open. A heartbeat may open one; under load that takes longer
        # than the end of a run, and each worker then logged a traceback of 60 lines (distributed 2026.8.0).
        for address in self._live:
            self._scheduler.stream_comms[address].send({"op": ASK})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ANSWER_S if self._live else 0):
                await self._answered.wait()
        return asdict(self.summary())

    def take_answer(self, worker: str, facts: dict[str, Any]) -> None:
        """Record a worker's answer; distributed calls this."""
        if life := self._live.get(worker):
            state, _ = life
            state.metrics = {**state.metrics, KEY: facts}
        self._silent.discard(worker)
        if not self._silent:
            self._answered.set()


def _place(worker: Any) -> tuple[str, str]:
    """Return the node of a worker, and its GPU's PCI address; "" for a worker that hpcgpu has not started."""
    planned = worker.extra.get(KEY, {})
    return planned.get("node", ""), planned.get("pci", "")


async def say_summary(scheduler: Scheduler, how: str) -> None:
    """Log the run's usage: ``lines``, or also ``json``; nothing if ``how`` is "" or no worker came. Never raises."""
    if not how:
        return
    try:
        summary = Summary(**await scheduler.plugins[UsagePlugin.name].fresh_summary())
        if not summary.workers:
            return
        for line in summary.lines:
            log.say(f"summary: {line}")
        if how == "json":
            log.say(f"{_JSON}{summary.as_json()}")
    except Exception as e:  # other code may run in the workers, and report anything
        log.say(f"there is no summary of this run: {reason_of(e)}")
