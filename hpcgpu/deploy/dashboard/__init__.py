"""The facts of workers: collected for heartbeats and where people ask, and recorded for the summary, page and metrics.

They go with distributed's heartbeats (``Worker.metrics``, ``Worker.startup_information``) as sums that the workers
keep; the scheduler reads them when a worker leaves, and on request.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from distributed import Client, Scheduler, Security, Worker
from distributed.core import clean_exception
from distributed.diagnostics import nvml
from distributed.diagnostics.plugin import SchedulerPlugin, WorkerPlugin
from distributed.protocol.pickle import dumps, loads

from hpcgpu.errors import ConfigError, HpcGpuError, message_of
from hpcgpu.host import host_memory, log, process
from hpcgpu.model import WorkerSpec
from hpcgpu.plan.jobs import by_number
from hpcgpu.report.machine import binding_differences
from hpcgpu.report.summary import Summary, sum_up
from hpcgpu.report.workers import TIERS, Bindings, Memory, WorkerFacts, planned, read_facts
from hpcgpu.supervise import reason_of

# Their key in distributed's messages.
KEY = "hpcgpu"
# The scheduler's request for the present sums, and the answer.
ASK, ANSWER = "hpcgpu-ask", "hpcgpu-told"
_RUNNING = ("executing", "long-running")
# Reading the masks of all threads takes about 1 ms.
_READ_S = 30.0


class WorkerMetrics(WorkerPlugin):
    """Measures one worker, on its event loop."""

    name = "hpcgpu-facts"

    def __init__(self, spec: WorkerSpec, clock: Callable[[], float] = time.monotonic) -> None:
        self._spec, self._clock = spec, clock
        self._running: set[Any] = set()
        self._busy_s = self._since = 0.0
        self._peaks = dict.fromkeys((*TIERS, "process"), 0)
        self._last = (self._clock(), 0.0)  # when the utilisation was asked for, and the busy time then
        self._differences: tuple[float, tuple[str, ...]] = (float("-inf"), ())

    def setup(self, worker: Worker) -> None:
        """Register the facts; distributed calls this when the worker starts."""
        self._worker = worker
        worker.startup_information[KEY] = lambda _: {"node": socket.gethostname(), **planned(self._spec)}
        worker.metrics[KEY] = lambda _: self._now()
        worker.stream_handlers[ASK] = lambda: worker.batched_send({"op": ANSWER, "facts": self._now()})
        if self._spec.simulated:
            # distributed's own names: its pages of GPUs read them
            worker.metrics["gpu_memory_used"] = lambda _: _read_device(self._spec)["device_used_bytes"]
            worker.metrics["gpu-memory-total"] = lambda _: self._spec.device_memory_bytes
            worker.metrics["gpu_utilization"] = lambda _: self._utilisation()

    def transition(self, key: Any, start: str, finish: str, **_: object) -> None:
        """Count the time in which a task runs; distributed calls this for each step of each task."""
        if finish in _RUNNING:
            if not self._running:
                self._since = self._clock()
            self._running.add(key)
        elif start in _RUNNING and key in self._running:
            self._running.remove(key)
            self._note_peaks()
            if not self._running:
                self._busy_s += self._clock() - self._since

    def busy_s(self) -> float:
        """Return for how long at least one task has run."""
        return self._busy_s + (self._clock() - self._since if self._running else 0.0)

    def _note_peaks(self, process_bytes: int = 0) -> None:
        for tier, nbytes in {**self._worker.data.tiers, "process": process_bytes}.items():
            self._peaks[tier] = max(self._peaks[tier], nbytes)

    def _now(self) -> dict[str, Any]:
        memory = _read_memory(self._worker)
        self._note_peaks(memory["process_bytes"])
        use = {"busy_s": self.busy_s(), "peaks": dict(self._peaks)}
        return {**memory, **use, "differences": list(self._binding_differences())}

    def _binding_differences(self) -> tuple[str, ...]:
        read_s, before = self._differences
        if (now := self._clock()) - read_s <= _READ_S:
            return before
        try:
            new = binding_differences(self._spec, replace(process.read_binding(), env=self._spec.env))
        except HpcGpuError as e:
            new = (str(e),)
        self._differences = (now, new)
        return new

    def _utilisation(self) -> int:
        """Return the percentage of the time since the last heartbeat in which a task ran."""
        now, busy_s = self._clock(), self.busy_s()
        (before, busy_before), self._last = self._last, (now, busy_s)
        return min(100, round(100 * (busy_s - busy_before) / (now - before))) if now > before else 0


def collect(dask_worker: Worker) -> WorkerFacts:
    """Collect a worker's facts, its binding as the kernel has it now; called in the worker."""
    plugin: Any = dask_worker.plugins.get("hpcgpu")  # of deploy.processes
    spec: WorkerSpec | None = getattr(plugin, "spec", None)
    name, node, memory = str(dask_worker.name), socket.gethostname(), _read_memory(dask_worker)
    if spec is None:
        return read_facts(name, memory, _read_device(spec), node=node)
    env = tuple((name, os.environ[name]) for name, _ in spec.env if name in os.environ)
    now = replace(process.read_binding(), env=env)
    direct = {
        "spec": spec,
        "actual": now,
        "differences": binding_differences(spec, now),
        "node_copies": plugin.copy_obstacle(),
    }
    return read_facts(name, planned(spec), memory, _read_device(spec), node=node, **direct)


def _read_memory(worker: Worker) -> dict[str, Any]:
    """Return a worker's memory and moves as plain data, under the names of :class:`WorkerFacts`."""
    store = worker.data
    facts = {"process_bytes": int(worker.monitor.get_process_memory()), "allocator": host_memory.in_force()}
    if not hasattr(store, "tiers"):  # not the spill store
        return facts
    tiers, spilled = store.tiers, store.spilled_total.disk
    immovable_number, immovable_bytes = store.immovable
    limit = {"device_limit_bytes": store.device_limit_bytes} if store.device_limit_bytes else {}
    return {
        **facts,
        **limit,
        "tiers": tiers,
        "copy_bytes": store.copy_bytes,
        "host_limit_bytes": worker.memory_manager.memory_limit or None,
        "spilled_to_host_bytes": max(0, spilled - tiers["disk"]),
        "moved": {way: (c.nbytes, c.number, c.seconds) for way, c in store.counters.items()},
        "rescues": store.rescues,
        "immovable_number": immovable_number,
        "immovable_bytes": immovable_bytes,
    }


def _read_device(spec: WorkerSpec | None) -> dict[str, Any]:
    """Return what is in use on the worker's device, and its size if no plan has it, without making a CUDA context."""
    if spec is not None and spec.gpu is None:
        return {}
    capacity = spec.device_memory_bytes if spec else 0
    sim = sys.modules.get("hpcgpu.sim") if spec is None or spec.simulated else None
    if sim:
        gpu = sim.current_gpu()
        now = gpu.used_bytes, gpu.memory_bytes, "simulated"
    elif (cupy := sys.modules.get("cupy")) and (pool := cupy.get_default_memory_pool()).total_bytes():
        now = pool.used_bytes(), capacity or cupy.cuda.runtime.memGetInfo()[1], "pool"
    elif nvml.device_get_count():
        now = nvml.real_time()["memory-used"], capacity or nvml.one_time()["memory-total"], "NVML"
    else:
        return {}
    return dict(zip(("device_used_bytes", "device_capacity_bytes", "device_source"), now, strict=True))


# How long workers may take to answer; without an answer their last heartbeats count, which are 0.5 to 3 s apart.
_ANSWER_S = 1.0
# The prefix of the line of JSON, for grep.
JSON = "summary as JSON: "


class UsagePlugin(SchedulerPlugin):
    """The memory and time that each worker was given and used; ``walltime_s`` is the requested time limit."""

    name = "hpcgpu-usage"

    def __init__(
        self, scheduler: Scheduler, walltime_s: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._scheduler, self._walltime_s, self._clock = scheduler, walltime_s, clock
        self._begin_s = clock()
        self._live: dict[str, tuple[Any, float]] = {}  # distributed's WorkerState, and since when
        self._ended: list[WorkerFacts] = []
        self._began = Counter[str]()
        self._silent: set[str] = set()  # workers that were asked and have not answered
        self._answered = asyncio.Event()

    @classmethod
    def attach(cls, scheduler: Scheduler, walltime_s: int | None) -> None:
        """Add the plugin, and its request handlers, to a scheduler that has not been started."""
        plugin = cls(scheduler, walltime_s)
        scheduler.add_plugin(plugin)
        scheduler.handlers["hpcgpu_summary"] = plugin.fresh_summary
        scheduler.stream_handlers[ANSWER] = plugin.take_answer

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """Begin a life; distributed calls this when a worker has registered."""
        state = scheduler.workers[worker]
        self._live[worker] = state, self._clock()
        self._began[str(state.name)] += 1

    def remove_worker(self, scheduler: Scheduler, worker: str, **_: object) -> None:
        """End a life; distributed calls this when a worker is gone."""
        if life := self._live.pop(worker, None):
            self._ended.append(self._facts(*life))
            self._silent.discard(worker)
            if not self._silent:
                self._answered.set()

    def gpus(self) -> list[WorkerFacts]:
        """Return the last heartbeat's facts of each worker with a GPU, in the order of nodes and numbers."""
        workers = [self._facts(*life) for life in self._live.values()]
        return sorted((facts for facts in workers if facts.gpu), key=lambda facts: by_number(facts.name))

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
        return sum_up(lives, self._clock() - self._begin_s, self._walltime_s)

    async def fresh_summary(self) -> dict[str, Any]:
        """Ask the workers for their sums, and return the facts of the summary (``hpcgpu_summary``)."""
        # Question and answer use the connections that are open. A heartbeat may open one; under load that takes longer
        # than the end of a run, and each worker then logged a traceback of 60 lines (distributed 2026.8.0).
        self._silent = set(self._live)
        self._answered.clear()
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
            log.say(f"{JSON}{summary.as_json()}")
    except Exception as e:  # other code may run in the workers, and report anything
        log.say(f"there is no summary of this run: {reason_of(e)}")


def bindings(client: Client) -> Any:  # a coroutine from an asynchronous client
    """Return each worker's binding, read back from the kernel now: threads, memory policy, environment.

    Parameters
    ----------
    client : Client
        Of a cluster whose workers hpcgpu has started.

    Returns
    -------
    Bindings
        An awaitable of it where the client is asynchronous.

    Raises
    ------
    ConfigError
        A worker was started by something else.

    """
    return client.sync(read_bindings, client.scheduler)


def bindings_at(address: str, tls: dict[str, str]) -> Bindings:
    """Return the bindings of the cluster at an address; ``tls`` are arguments of Security."""
    try:
        with Client(address, security=Security(**tls) if tls else None) as client:
            return bindings(client)
    except OSError as e:
        why = f"no scheduler answers at {address}: {message_of(e)}"
        raise ConfigError(f"{why}; give its address, and --tls-... for tls") from e


def memory(client: Client) -> Any:  # a coroutine from an asynchronous client
    """Return the memory of each worker now: on the device, in the host, spilled, and the moves with their speed.

    Parameters
    ----------
    client : Client
        Of a cluster whose workers have the spill store: hpcgpu's own, or others with it.

    Returns
    -------
    Memory
        It prints as a table, ``.workers`` has the numbers; an awaitable of it where the client is asynchronous.

    Raises
    ------
    ConfigError
        A worker has no spill store.

    """
    return client.sync(read_memory, client.scheduler)


def trim_memory(client: Client) -> Any:
    """Have all workers collect garbage and give free memory back to the kernel.

    glibc keeps freed memory that lies below memory in use. Dask shows it as unmanaged memory of the process.
    ``malloc_trim(0)`` returns whole pages of it; jemalloc's ``purge`` does if jemalloc is loaded. Workers keep free
    blocks of up to 4 MiB (``MALLOC_MMAP_THRESHOLD_``) and 16 MiB of the heap's end (``MALLOC_TRIM_THRESHOLD_``). glibc
    reads these before ``main`` only: they are set for the fork server, and what ``env=`` has for workers by mallopt(3).

    Parameters
    ----------
    client : Client
        Of any cluster whose workers can import hpcgpu.

    Returns
    -------
    dict of str to int
        Bytes by which each worker's resident memory has become smaller, by its name; an awaitable of it where the
        client is asynchronous.

    """
    return client.sync(trim, client.scheduler)


async def read_bindings(scheduler: Any) -> Bindings:  # distributed's rpc
    """Ask the workers of a scheduler for their bindings; raise ConfigError if hpcgpu has not started one."""
    facts = await _collect(scheduler)
    if other := next((w for w in facts if w.spec is None), None):
        raise ConfigError(
            f"worker {other.name} was not started by hpcgpu, which has planned no binding for it; "
            "bindings() asks workers of SLURMGPUCluster, PBSGPUCluster, LocalGPUCluster and 'hpcgpu launch'"
        )
    return Bindings(facts)


async def read_memory(scheduler: Any) -> Memory:
    """Ask the workers of a scheduler for their memory; raise ConfigError if one has no spill store."""
    facts = await _collect(scheduler)
    if other := next((w for w in facts if not w.tiers), None):
        raise ConfigError(
            f"worker {other.name} has a store for its data that does not count bytes by tier; "
            "memory() asks workers of hpcgpu, or with data=(hpcgpu.spill.GpuSpillBuffer, {...})"
        )
    return Memory(facts)


async def trim(scheduler: Any) -> dict[str, int]:
    """Have the workers of a scheduler trim their memory; return the freed bytes by name."""
    return dict(sorted(await _ask_all(scheduler, _trim), key=lambda answer: by_number(answer[0])))


async def _collect(scheduler: Any) -> tuple[WorkerFacts, ...]:
    return tuple(sorted(await _ask_all(scheduler, collect), key=lambda w: by_number(w.name)))


async def _ask_all(scheduler: Any, function: Callable[[Worker], Any]) -> list[Any]:
    """Return the results of all workers; raise the first error."""
    answers = list((await ask(scheduler, function)).values())
    for error in (answer for answer in answers if isinstance(answer, Exception)):
        raise error
    return answers


async def ask(scheduler: Any, function: Callable[[Worker], Any] = collect) -> dict[str, Any]:
    """Call a function in all workers of a scheduler; return results, or exceptions, by address."""
    message = {"op": "run", "function": dumps(function), "args": dumps(()), "kwargs": dumps({}), "wait": True}
    answers: dict[str, Any] = {}
    for address, answer in (await scheduler.broadcast(msg=message, on_error="return_pickle")).items():
        if isinstance(answer, bytes):
            answers[address] = loads(answer)  # an error of the connection
        else:
            answers[address] = answer["result"] if answer["status"] == "OK" else clean_exception(**answer)[1]
    return answers


async def _trim(dask_worker: Worker) -> tuple[str, int]:
    from hpcgpu.spill import GpuSpillBuffer  # 45 CPU ms, which only a worker has paid already

    # in a thread, since it takes a moment for each GB, in which the worker must answer
    def trim() -> int:
        if isinstance(dask_worker.data, GpuSpillBuffer):
            dask_worker.data.trim()
        return host_memory.trim()

    return str(dask_worker.name), await asyncio.to_thread(trim)
