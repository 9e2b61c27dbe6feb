"""What a worker reports of itself, and what becomes of it: the ledger, and Prometheus' text."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from hpcgpu.deploy.dashboard import KEY, UsagePlugin, WorkerMetrics
from hpcgpu.deploy.dashboard.page import SHARE, History, Sample
from hpcgpu.model import Binding, CpuSet, Gpu, WorkerSpec
from hpcgpu.report.summary import render
from hpcgpu.report.workers import Moved, WorkerFacts, read_facts
from hpcgpu.spill.store import Count

GPU = Gpu("ffff:00:00.0", "GPU-SIM-n-0", "simulated", memory_bytes=100)
SPEC = WorkerSpec(
    name="n-0",
    binding=Binding(CpuSet(os.sched_getaffinity(0)), (GPU,)),
    device_memory_limit_bytes=80,
    device_memory_bytes=100,
    memory_limit_bytes=500,
    simulated=True,
)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def worker() -> SimpleNamespace:
    store = SimpleNamespace(
        tiers={"device": 5, "host": 0, "disk": 0},
        counters={"device_to_host": Count(7, 1, 0.5)},
        spilled_total=SimpleNamespace(disk=0),
        copy_bytes=0,
        device_limit_bytes=80,
        immovable=(0, 0),
        rescues=0,
    )
    return SimpleNamespace(
        data=store,
        memory_manager=SimpleNamespace(memory_limit=500),
        monitor=SimpleNamespace(get_process_memory=lambda: 40),
        startup_information={},
        metrics={},
        stream_handlers={},
        handlers={},
        heartbeat=None,
    )


def test_time_with_a_task_is_counted_once() -> None:
    clock = Clock()
    facts, one = WorkerMetrics(SPEC, clock), worker()
    facts.setup(one)
    facts.transition("a", "ready", "executing")
    clock.now = 1
    facts.transition("b", "ready", "executing")  # another thread
    clock.now = 3
    facts.transition("a", "executing", "long-running")
    facts.transition("a", "long-running", "memory")
    one.data.tiers = {"device": 2, "host": 3, "disk": 0}
    clock.now = 4
    assert one.metrics["gpu_utilization"](one) == 100
    facts.transition("b", "executing", "error")
    clock.now = 8
    now = one.metrics[KEY](one)
    assert (now["busy_s"], now["moved"]) == (4, {"device_to_host": (7, 1, 0.5)})
    assert now["peaks"] == {"device": 5, "host": 3, "disk": 0, "process": 40}
    assert one.metrics["gpu_utilization"](one) == 0
    assert one.metrics["gpu-memory-total"](one) == 100
    assert one.startup_information[KEY](one)["gpu"] == "GPU-SIM-n-0"
    limits = read_facts("n-0", one.startup_information[KEY](one), now).limits
    assert limits == {"device": 80, "capacity": 100, "process": 500}


def test_differences_from_the_plan_are_looked_for_now_and_then() -> None:
    clock, before = Clock(), os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("one core: no other mask")
    facts, one = WorkerMetrics(SPEC, clock), worker()
    facts.setup(one)
    assert one.metrics[KEY](one)["differences"] == []
    try:
        os.sched_setaffinity(0, {min(before)})
        assert one.metrics[KEY](one)["differences"] == []
        clock.now = 31
        (said,) = one.metrics[KEY](one)["differences"]
    finally:
        os.sched_setaffinity(0, before)
    assert f"threads may run on PUs {min(before)}, planned: " in said


def state(name: str, busy_s: float) -> SimpleNamespace:
    fixed = {"node": "n", "gpu": "GPU-0"}
    now = {"busy_s": busy_s, "tiers": {"device": 20}, "moved": {"device_to_host": [7, 1, 0.5]}, "peaks": {"device": 30}}
    now["device_limit_bytes"] = 80
    return SimpleNamespace(name=name, extra={KEY: fixed}, metrics={KEY: now, "gpu_utilization": 50})


def test_the_ledger_keeps_those_that_are_gone() -> None:
    clock = Clock()
    ledger = UsagePlugin(SimpleNamespace(), clock=clock)
    for begin_s, end_s in ((0, 10), (12, 20)):
        clock.now = begin_s
        ledger.add_worker(SimpleNamespace(workers={"a": state("n-0", 4)}), "a")
        clock.now = end_s
        usage = ledger.summary()
        (now,) = ledger.gpus()
        ledger.remove_worker(SimpleNamespace(), "a")
    assert (usage.gpu_s, usage.idle_gpu_s, usage.restarts) == (18, 10, 1)
    assert usage.moved_bytes["device_to_host"] == 14
    assert (now.restarts, now.device_share, now.utilisation_percent) == (1, 0.25, 50)
    assert ledger.gpus() == []
    assert ledger.summary() == usage


def test_prometheus() -> None:
    gpu = WorkerFacts(name='a"b\\', node="n", gpu="G", tiers={"device": 3}, utilisation_percent=50, differences=["x"])
    text = render([gpu])
    labels = r'worker="a\"b\\",node="n",gpu="G"'
    assert f'hpcgpu_memory_bytes{{{labels},tier="device"}} 3\n' in text
    assert f"hpcgpu_gpu_utilization_ratio{{{labels}}} 0.5\n" in text
    assert f"hpcgpu_binding_differences{{{labels}}} 1\n" in text
    assert "hpcgpu_device_memory_used_bytes{" not in text  # unknown
    assert text.count("# TYPE ") == text.count("# HELP ") == 7


def test_history_of_workers_that_come_and_go() -> None:
    def gpu(name: str, moved: int) -> WorkerFacts:
        return WorkerFacts(
            name=name, tiers={"device": 10}, device_limit_bytes=20, moved={"device_to_host": Moved(moved)}
        )

    history = History(3)
    assert not history.add(Sample.of(1.0, [gpu("a", 0)]))
    assert history.add(Sample.of(2.0, [gpu("a", 100)]))
    assert not history.add(Sample.of(4.0, [gpu("a", 0), gpu("b", 10)]))
    assert history.series("a")["device_to_host"] == [0, 100, 0]  # it was started anew
    assert history.series("")["device"] == [10, 10, 20]
    older, *_, newest = history.strip(SHARE)
    assert older.shape == newest.shape == (2, 1)
    assert newest.tolist() == [[50], [50]]
    assert older[1] == 50  # the first worker is on top
    assert older[0] != older[0]  # the other one was not there
