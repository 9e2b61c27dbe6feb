"""What people see of a run: progress, the dashboard's link, what workers report, and Prometheus' text."""

import asyncio
import contextlib
import json
import os
import re
import sys
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock

import dask
import pytest

from hpcgpu import GPURunner
from hpcgpu.deploy.dashboard.page import SHARE, History, strip_column
from hpcgpu.deploy.dashboard.usage import UsagePlugin
from hpcgpu.deploy.dashboard.worker_metrics import KEY, WorkerMetrics
from hpcgpu.deploy.network.dashboard import Forwarder, far_hint, link
from hpcgpu.deploy.progress import Notebook, Progress, Terminal, _elapsed
from hpcgpu.host import private
from hpcgpu.model import Binding, CpuSet, Gpu, WorkerSpec
from hpcgpu.model.allocation import SCRIPT_ADDRESS, SCRIPT_DASHBOARD
from hpcgpu.plan.jobs.job import Phase
from hpcgpu.plan.jobs.job_text import READY
from hpcgpu.report.energy import EnergyUse
from hpcgpu.report.metrics import render
from hpcgpu.report.workers import Moved, WorkerFacts, by_node, read_facts
from hpcgpu.spill.store.inbox import Count

HERE, SECRET = "http://127.0.0.1:4000/SECRET/status", "proxy/4000/SECRET/status"
GPU = Gpu("ffff:00:00.0", "GPU-SIM-n-0", "simulated", memory_bytes=100)
LIMITS = {"device_memory_limit_bytes": 80, "device_memory_bytes": 100, "memory_limit_bytes": 500}
SPEC = WorkerSpec(name="n-0", binding=Binding(CpuSet(os.sched_getaffinity(0)), (GPU,)), simulated=True, **LIMITS)
COLOURS = {"UP": "32", "GONE": "31", "UNKNOWN": "31", "WILL NOT START": "31", READY: "32"}


@pytest.mark.parametrize(
    ("environ", "address"),
    [
        ({}, HERE),
        ({"JUPYTERHUB_SERVICE_PREFIX": "/user/ada/"}, f"/user/ada/{SECRET}"),
        ({"JUPYTERHUB_SERVICE_PREFIX": "/hub/user/ada/lab-2/"}, f"/hub/user/ada/lab-2/{SECRET}"),
    ],
)
def test_link_here_and_behind_jupyterhub(environ: dict[str, str], address: str) -> None:
    assert link(4000, "SECRET", environ) == address


@pytest.mark.parametrize("base", ["/node/n7/8888/", "/rnode/n7/8888/", "/"])
def test_link_behind_open_ondemand(base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "jpserver-77.json").write_text(json.dumps({"base_url": base, "pid": 77}))
    assert link(4000, "SECRET", {"JPY_PARENT_PID": "77"}) == (HERE if base == "/" else f"{base}{SECRET}")
    assert link(4000, "SECRET", {"JPY_PARENT_PID": "78"}) == HERE


def test_link_of_a_jobs_own_cluster_in_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook of the job itself, as of Open OnDemand's app."""
    private.write(tmp_path / "dashboard", f"{HERE}\n")
    monkeypatch.setenv(SCRIPT_DASHBOARD, str(tmp_path / "dashboard"))
    monkeypatch.setenv(SCRIPT_ADDRESS, "tls://10.0.0.1:8786")
    runner = GPURunner()
    assert runner.dashboard_link == HERE
    monkeypatch.setenv("JUPYTERHUB_SERVICE_PREFIX", "/user/ada/")
    assert runner.dashboard_link == f"/user/ada/{SECRET}"
    assert runner._repr_html_() == "GPURunner(tls://10.0.0.1:8786)"  # Client(runner) shows it
    runner.close()
    assert runner.dashboard_link == ""


def test_dasks_own_template_is_the_users_word() -> None:
    template = "https://hub.example/user/{ME}/proxy/{port}/status"
    with dask.config.set({"distributed.dashboard.link": template}), pytest.MonkeyPatch.context() as patch:
        patch.setenv("ME", "ada")
        found = link(4000, "SECRET", {"JUPYTERHUB_SERVICE_PREFIX": "/user/eve/"})
    assert found == "https://hub.example/user/ada/proxy/4000/SECRET/status"


SSH, SERVER = {"SSH_CONNECTION": "1 2 3 4"}, {"VSCODE_AGENT_FOLDER": "/home/ada/.vscode-server", "VSCODE_CWD": "/"}


@pytest.mark.parametrize(
    ("environ", "host", "hints"),
    [
        ({}, "laptop", ()),
        ({"VSCODE_PID": "7", "VSCODE_CWD": "/"}, "laptop", ()),
        (SSH, "login2", ("ssh -N -L 4000:127.0.0.1:4000 login2)",)),
        (SSH | {"JPY_PARENT_PID": "7"}, "login2", ("ssh -N -L 4000:127.0.0.1:4000 login2)",)),
        (SSH | SERVER, "login2", ("127.0.0.1:4000 login2;", "in VS Code, add port 4000 to its panel Ports)")),
        (SERVER, "login2", ("in VS Code, add port 4000 to its panel Ports)",)),
        ({"SLURM_SUBMIT_HOST": "login2"}, "node7", ("ssh -N -L 4000:127.0.0.1:4000 -J login2 node7)",)),
        ({"PBS_O_HOST": "login2"}, "node7", ("ssh -N -L 4000:127.0.0.1:4000 -J login2 node7)",)),
        (SSH | {"JUPYTERHUB_SERVICE_PREFIX": "/user/ada/"}, "hub", ()),
    ],
)
def test_browser_elsewhere_is_told_how_to_reach_a_loopback(
    environ: dict[str, str], host: str, hints: tuple[str, ...]
) -> None:
    """Of a kernel without proxies, too: in VS Code, or of a Jupyter behind ssh."""
    hint = far_hint(link(4000, "SECRET", environ), environ, host)
    assert bool(hint) == bool(hints)
    assert all(part in hint for part in hints), hint


async def no_scheduler() -> Forwarder:
    return await Forwarder(AsyncMock(side_effect=OSError("gone")), lambda: "SECRET").listen()


async def last_answer(forwarder: Forwarder, path: str) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", forwarder.port)
    writer.write(f"GET {path} HTTP/1.1\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    forwarder.close()
    return answer


async def test_no_way_to_the_scheduler_is_said_in_the_browser() -> None:
    answer = await last_answer(await no_scheduler(), "/SECRET/status")
    assert answer.startswith(b"HTTP/1.1 502")
    assert b"The scheduler does not answer: gone" in answer


@pytest.mark.parametrize("extension", [True, False])
async def test_only_an_extensions_own_process_needs_no_secret(extension: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if extension:
        monkeypatch.setitem(sys.modules, "dask_labextension", SimpleNamespace())
    assert (await last_answer(await no_scheduler(), "/status")).split()[1] == (b"502" if extension else b"404")
    forwarder = await no_scheduler()
    code = f"import urllib.request; urllib.request.urlopen('http://127.0.0.1:{forwarder.port}/status')"
    other = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stderr=asyncio.subprocess.PIPE)
    assert b"HTTP Error 404" in (await other.communicate())[1]
    forwarder.close()


async def test_neighbours_who_only_connect_are_limited() -> None:
    """The one that has waited longest makes room for a browser."""
    forwarder = await no_scheduler()
    silent = [await asyncio.open_connection("127.0.0.1", forwarder.port) for _ in range(64)]
    assert (await last_answer(forwarder, "/")).startswith(b"HTTP/1.1 404")
    with contextlib.suppress(ConnectionResetError):
        assert await silent[0][0].read() == b""
    for _, other in silent:
        other.close()


# --- what a worker reports of itself, and what becomes of it


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def worker() -> SimpleNamespace:
    store = SimpleNamespace(copy_bytes=0, device_limit_bytes=80, immovable=(0, 0), rescues=0)
    store.tiers, store.counters = {"device": 5, "host": 0, "disk": 0}, {"device_to_host": Count(7, 1, 0.5)}
    store.spilled_total = SimpleNamespace(disk=0)
    one = SimpleNamespace(
        data=store, startup_information={}, metrics={}, stream_handlers={}, handlers={}, heartbeat=None
    )
    one.memory_manager = SimpleNamespace(memory_limit=500)
    one.monitor = SimpleNamespace(get_process_memory=lambda: 40)
    return one


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


async def test_the_ledger_keeps_those_that_are_gone() -> None:
    clock = Clock()
    ledger = UsagePlugin(SimpleNamespace(), clock=clock)
    for begin_s, end_s in ((0, 10), (12, 20)):
        clock.now = begin_s
        ledger.add_worker(SimpleNamespace(workers={"a": state("n-0", 4)}), "a")
        clock.now = end_s
        usage = ledger.summary()
        (now,) = await ledger.gpus()
        ledger.remove_worker(SimpleNamespace(), "a")
    assert (usage.gpu_s, usage.idle_gpu_s, usage.restarts) == (18, 10, 1)
    assert usage.moved_bytes["device_to_host"] == 14
    assert (now.restarts, now.device_share, now.utilisation_percent) == (1, 0.25, 50)
    assert await ledger.gpus() == []
    assert ledger.summary() == usage


def test_energy_of_one_that_dies_stays() -> None:
    """Two workers share a GPU and a node; both are busy, one half of the time; one dies and another one comes."""
    usage = UsagePlugin(SimpleNamespace(), carbon_g_per_kwh=36.0)

    def report(worker: SimpleNamespace, joules: float) -> None:
        energy = {"gpu_energy_j": joules, "busy_gpu_energy_j": joules / 2, "cpu_energy_j": 2 * joules}
        worker.metrics = {KEY: {**worker.metrics[KEY], **energy}}

    first, second, third = (state(name, 0) for name in ("n-0", "n-1", "n-0"))
    scheduler = SimpleNamespace(workers={"a": first, "b": second, "c": third})
    for address, worker in (("a", first), ("b", second)):
        report(worker, 0)
        usage.add_worker(scheduler, address)
    report(first, 100)
    report(second, 100)
    usage.remove_worker(scheduler, "a")
    report(second, 140)
    report(third, 0)
    usage.add_worker(scheduler, "c")
    report(third, 60)
    report(second, 190)  # its last heartbeat is the older one
    usage.remove_worker(scheduler, "b")
    usage.remove_worker(scheduler, "c")
    summary = usage.summary()
    assert (summary.gpu_energy_j, summary.cpu_energy_j) == (200, 400)
    assert summary.idle_gpu_energy_j == 200 - (50 + 95 + 30)
    assert summary.carbon_g == pytest.approx(600 * 36 / 3.6e6)
    assert 'hpcgpu_gpu_energy_joules_total{node="n",pci=""} 200' in render([], usage.energy())


def test_energy_is_a_tasks_for_the_time_that_it_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    joules, clock = iter((100, 400, 400)), Clock()
    reader = SimpleNamespace(read=lambda: next(joules))
    monkeypatch.setattr("hpcgpu.deploy.dashboard.worker_metrics.GpuEnergy", lambda *_: reader)
    spec = WorkerSpec(name="n-0", binding=Binding(SPEC.binding.cpuset, (GPU,)), **LIMITS)
    facts, one = WorkerMetrics(spec, clock), worker()
    facts.setup(one)
    clock.now = 1
    first = one.metrics[KEY](one)
    facts.transition("a", "ready", "executing")
    clock.now = 2
    facts.transition("a", "executing", "memory")
    clock.now = 5
    second = one.metrics[KEY](one)
    assert (first["gpu_energy_j"], first["busy_gpu_energy_j"]) == (100, 0)
    assert (second["gpu_energy_j"], second["busy_gpu_energy_j"]) == (400, 75)
    assert one.metrics[KEY](one)["busy_gpu_energy_j"] == 75


@pytest.mark.parametrize(("count", "shown"), [(512, 512), (513, 65)])
async def test_facts_of_many_workers_let_the_loop_go_on(
    count: int, shown: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpcgpu.deploy.dashboard.usage._HOLD_S", -1.0)
    ledger, turns = UsagePlugin(SimpleNamespace()), 0
    for i in range(count):
        one = state(f"n{i // 8}-{i % 8}", 0)
        one.extra[KEY] = {**one.extra[KEY], "node": f"n{i // 8}"}
        ledger.add_worker(SimpleNamespace(workers={str(i): one}), str(i))

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    turning = asyncio.create_task(turn())
    gpus, rows = await ledger.rows()
    turning.cancel()
    assert (len(gpus), len(rows)) == (count, shown)
    assert turns >= count


def test_prometheus() -> None:
    gpu = WorkerFacts(name='a"b\\', node="n", gpu="G", tiers={"device": 3}, utilisation_percent=50, differences=["x"])
    text = render([gpu], EnergyUse())
    labels = r'worker="a\"b\\",node="n",gpu="G"'
    assert f'hpcgpu_memory_bytes{{{labels},tier="device"}} 3\n' in text
    assert f"hpcgpu_gpu_utilization_ratio{{{labels}}} 0.5\n" in text
    assert f"hpcgpu_binding_differences{{{labels}}} 1\n" in text
    assert "hpcgpu_device_memory_used_bytes{" not in text  # unknown
    assert text.count("# TYPE ") == text.count("# HELP ") == 10


def test_metrics_of_many_gpus_are_the_sums_of_their_nodes() -> None:
    def gpu(index: int) -> WorkerFacts:
        node, percent = f"n{index // 8}", 100 * (index % 2)
        used = {"device_used_bytes": 5, "device_source": "NVML", "moved": {"device_to_host": Moved(2)}}
        tiers = {"device": index}
        return WorkerFacts(
            name=str(index), node=node, gpu=f"G{index}", tiers=tiers, utilisation_percent=percent, **used
        )

    energy = EnergyUse()
    for i in range(16):
        energy.note(str(i), f"n{i // 8}", f"p{i}", {"gpu_energy_j": 2.0, "busy_gpu_energy_j": 1.0, "cpu_energy_j": 3.0})
    few = render([gpu(i) for i in range(512)], energy)
    many = render([*by_node([gpu(i) for i in range(4000)])], energy, is_folded=True)
    assert 'hpcgpu_gpu_energy_joules_total{node="n1",pci="p15"} 2.0\n' in few
    assert few.count("hpcgpu_gpu_utilization_ratio{") == 512
    assert 'worker="511",node="n63",gpu="G511"' in few
    assert many.count("hpcgpu_gpu_utilization_ratio{") == 500
    for line in (
        f'hpcgpu_memory_bytes{{node="n499",tier="device"}} {sum(range(3992, 4000))}',
        'hpcgpu_device_memory_used_bytes{node="n0"} 40',
        'hpcgpu_gpu_energy_joules_total{node="n1"} 16.0',
        'hpcgpu_gpu_busy_energy_joules_total{node="n1"} 8.0',
        'hpcgpu_cpu_energy_joules_total{node="n1"} 3.0',
        'hpcgpu_gpu_utilization_ratio{node="n0"} 0.5',
        'hpcgpu_spill_moved_bytes_total{node="n0",direction="device_to_host"} 16',
    ):
        assert line in many
    assert 'worker="' not in many


def test_history_of_workers_that_come_and_go() -> None:
    def gpu(name: str, moved: int) -> WorkerFacts:
        ways = {"device_to_host": Moved(moved)}
        return WorkerFacts(name=name, tiers={"device": 10}, device_limit_bytes=20, moved=ways)

    history = History(3)
    assert not history.add(1.0, [gpu("a", 0)])
    assert history.add(2.0, [gpu("a", 100)])
    assert not history.add(4.0, [gpu("a", 0), gpu("b", 10)])
    assert history.series("a")["device_to_host"] == [0, 100, 0]  # it was started anew
    assert history.series("")["device"] == [10, 10, 20]
    older, *_, newest = (strip_column(sample, SHARE, ("a", "b")) for sample in history.samples)
    assert older.shape == newest.shape == (2, 1)
    assert newest.tolist() == [[50], [50]]
    assert older[1] == 50  # the first worker is on top
    assert older[0] != older[0]  # the other one was not there


# --- what a cluster says while it waits


def test_progress_elsewhere_is_a_line_per_change(capsys: pytest.CaptureFixture[str]) -> None:
    kept: list[tuple[datetime, str]] = []
    progress = Progress(kept)
    Progress([], quiet=True).show("PENDING")
    for text in ("PENDING", "PENDING", "STARTING 0/1"):
        progress.show(text)
    progress.say("the batch system does not answer")
    progress.end()
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == "hpcgpu: PENDING\nhpcgpu: STARTING 0/1\nhpcgpu: the batch system does not answer\n"
    assert [line for _, line in kept] == ["PENDING", "STARTING 0/1", "the batch system does not answer"]


def test_second_lost_node_is_told_as_the_first_was(capsys: pytest.CaptureFixture[str]) -> None:
    progress, small, lost = Progress([]), ("n0", "its disk is small"), "its leader is lost"
    progress.show_notes([small], [("n1", lost), ("n1", lost)], quiet=False)
    progress.show_notes([small, ("n4", "its disk is small")], [("n1", lost), ("n2", lost), ("n3", lost)], quiet=False)
    said = [f"hpcgpu: {line}" for line in ("n0: its disk is small", f"n1: {lost}", f"n2, n3: {lost}")]
    assert capsys.readouterr().err.splitlines() == said


def test_progress_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr("hpcgpu.deploy.progress.SHORT_S", float("inf"))  # rich is imported meanwhile
    progress = Progress([])
    progress.show("PENDING")
    progress.show("STARTING 0/1")
    progress.say("one of them died")
    progress.show("READY 1 worker")
    progress.end()
    said = capsys.readouterr()
    plain = re.sub(r"\x1b\[[0-9;]*m", "", said.err)  # without what is bold
    lines = ["\r\x1b[Khpcgpu: PENDING\r\x1b[Khpcgpu: STARTING 0/1", "hpcgpu: one of them died"]
    assert (plain, said.out) == ("\n".join([*lines, "\r\x1b[Khpcgpu: READY 1 worker" * 2, ""]), "")


@pytest.mark.parametrize("word", [READY, *(phase.value for phase in Phase)])
def test_phase_has_its_colour(word: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    Terminal().show(f"job 7: {word} (why)")
    assert f"\x1b[{COLOURS.get(word, '33')}m{word}\x1b[0m" in capsys.readouterr().err


class Screen:
    """A surface that keeps what was shown on it."""

    is_live = True

    def __init__(self) -> None:
        self.shown: list[str] = []
        self.news = asyncio.Event()

    def show(self, text: str) -> None:
        self.shown.append(text)
        self.news.set()

    say = show

    def end(self) -> None:
        self.shown.append("end")


def on(screen: Screen, monkeypatch: pytest.MonkeyPatch, **options: float) -> Progress:
    monkeypatch.setattr("hpcgpu.deploy.progress.surface", lambda: screen)
    return Progress([], **options)


async def test_the_time_that_passes_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    progress = on(screen := Screen(), monkeypatch)
    monkeypatch.setattr("hpcgpu.deploy.progress.SHORT_S", 0.0)
    progress.show("PENDING")
    screen.news.clear()
    await screen.news.wait()  # nothing has changed but the time
    progress.end()
    first, *more, last, end = screen.shown
    assert (first, last, end) == ("PENDING [0 s]", "PENDING", "end")
    assert re.fullmatch(r"PENDING \[\d+ s\]", more[0])


async def test_progress_shows_only_a_long_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit_s, first in ((60.0, "end"), (0.0, "closing [0 s]")):
        progress = on(screen := Screen(), monkeypatch)
        monkeypatch.setattr("hpcgpu.deploy.progress.SHORT_S", limit_s)
        with progress.waiting("closing"):
            if not limit_s:
                await screen.news.wait()
        assert screen.shown[0] == first
    late = on(screen := Screen(), monkeypatch, after_s=60.0)
    late.show("STARTING 0/1")
    late.end()
    assert screen.shown == ["end"]


@pytest.mark.parametrize(
    ("seconds", "text"), [(2.9, "2 s"), (60, "1 min 00 s"), (185, "3 min 05 s"), (7860, "2 h 11 min")]
)
def test_times_are_read_at_a_glance(seconds: float, text: str) -> None:
    assert _elapsed(seconds) == text


def test_a_notebook_has_one_display_in_each_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By IPython itself."""
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.capture import capture_output
    from traitlets.config import Config

    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    shell = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
    try:
        with capture_output() as made:
            notebook = Notebook(shell)
            notebook.show("job 4711: PENDING")
            notebook.show("READY <2> workers")
            notebook.end()
            notebook.say("dashboard: http://127.0.0.1:1/x")
            notebook.drop("dashboard: http://127.0.0.1:1/x")  # a cluster object shows it
            notebook.drop("what was not said")
            shell.execution_count += 1
            notebook.show("closing")
    finally:
        InteractiveShell.clear_instance()
    pages = [out.data["text/html"] for out in made.outputs]
    assert len(pages) == 5
    assert "READY &lt;2&gt; workers\ndashboard: <a href=" in pages[2]
    assert "READY" in pages[3]
    assert not any("dashboard" in page for page in pages[3:])
