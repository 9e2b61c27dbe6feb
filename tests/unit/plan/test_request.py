"""From settings to a request, what a queue cannot give, and names of workers that say their job."""

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcgpu.errors import ConfigError
from hpcgpu.model import JobSpec, Offer, Settings
from hpcgpu.model.worker_names import count_by_job, member_worker_name, read_member_name
from hpcgpu.plan.jobs.request import plan_request, shortfalls

ARGV = ("hpcgpu", "launch")
CPU_WORKERS = Settings(gpus_per_node=4, cores_per_gpu=8, cpu_workers=3, nthreads=2)
GIB = 1 << 30
BIG = Offer(queue="gpu", nodes=2, gpus=8, cpus=64, memory_bytes=500 * GIB, most_nodes=4, walltime_s=3600)
SMALL = Offer(queue="gpu", nodes=10, gpus=4, cpus=32, memory_bytes=200 * GIB, most_nodes=4, walltime_s=3600)
LONG = Offer(queue="long", nodes=3, gpus=4, cpus=32, memory_bytes=200 * GIB)
SOME = st.none() | st.integers(1, 8)
SIZES = {"nodes": st.integers(1, 4), "gpus": SOME, "cpus": SOME, "most_nodes": st.just(3)}
OFFERS = st.lists(st.builds(Offer, queue=st.sampled_from("ab"), **SIZES), min_size=1, max_size=4)
NUMBERS = st.integers(0, 10**7)
SERVERS = st.from_regex(r"[a-z0-9]([a-z0-9_.-]{0,20}[a-z0-9])?", fullmatch=True)
SLURM_IDS = st.one_of(NUMBERS.map(str), st.builds("{}_{}".format, NUMBERS, NUMBERS))
PBS_IDS = st.one_of(
    st.builds("{}.{}".format, NUMBERS, SERVERS), st.builds("{}[{}].{}".format, NUMBERS, NUMBERS, SERVERS)
)


def test_what_the_user_said_is_asked_for() -> None:
    same = {"nodes": 2, "gpus_per_node": 4, "walltime_s": 600, "queue": "gpu", "account": "proj", "log_directory": "/l"}
    given = {"cores_per_gpu": 8, "memory_bytes": 1 << 30, "job_name": "svd", "env": {"A": "b"}}
    asked = {"cpus_per_task": 8, "memory_per_node_bytes": 1 << 30, "name": "svd", "tasks_per_node": 4, "warn_s": 120}
    lines = {"prologue": ("module load cuda",), "extra_directives": ("-C a100",), "skipped_directives": ("--mem",)}
    names = ("job_script_prologue", "job_extra_directives", "job_directives_skip")
    settings = Settings(**same, **given, **dict(zip(names, lines.values(), strict=True)))
    assert plan_request(settings, ARGV) == JobSpec(argv=ARGV, **same, **asked, **lines)


@pytest.mark.parametrize(
    ("settings", "tasks", "cores", "gpus"),
    [
        (CPU_WORKERS, 4, 8 + 2, 4),  # six cores more, over four tasks
        (replace(CPU_WORKERS, ranks="node"), 1, 32 + 6, 4),
        (replace(CPU_WORKERS, cores_per_gpu=None), 4, None, 4),
        (Settings(gpus_per_node=4, cores_per_gpu=8, ranks="node"), 1, 32, 4),
        (Settings(gpus_per_node=4, cores_per_gpu=8, nodes=15), 4, 8, 4),
        (Settings(gpus_per_node=4, cores_per_gpu=8, nodes=16), 1, 32, 4),
        (Settings(gpus_per_node=4, cores_per_gpu=8, nodes=16, ranks="gpu"), 4, 8, 4),
        (Settings(gpus="sim:3x1MiB", nodes=2, cores_per_gpu=1), 3, 1, 0),
        (Settings(gpus_per_node=1), 1, None, 1),
        (Settings(gpus_per_node=0, cpu_workers=3, nthreads=2), 1, 6, 0),
    ],
)
def test_request_of_a_node(settings: Settings, tasks: int, cores: int | None, gpus: int) -> None:
    spec = plan_request(settings, ARGV)
    assert (spec.tasks_per_node, spec.cpus_per_task, spec.gpus_per_node) == (tasks, cores, gpus)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (Settings(), "the number of GPUs of each node"),
        (Settings(nodes=0, gpus_per_node=1), "nodes=0 of job"),
        (Settings(gpus="cuda:2"), "'cuda:2'"),
        (Settings(gpus_per_node=1, job_name=""), "needs a name"),
    ],
)
def test_what_cannot_be_is_said(settings: Settings, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plan_request(settings, ARGV)


def job(**asked: Any) -> JobSpec:
    return JobSpec(name="a", argv=("true",), **asked)


@pytest.mark.parametrize(
    ("offers", "asked", "texts"),
    [
        ((BIG, SMALL), {"nodes": 4, "gpus_per_node": 4, "walltime_s": 3600}, ()),
        ((BIG, SMALL), {"nodes": 5}, ("nodes=5, but queue gpu gives a job 4 at most",)),
        ((LONG,), {"nodes": 4}, ("nodes=4, but queue long has 3",)),
        ((BIG, SMALL), {"gpus_per_node": 9}, ("gpus_per_node=9, but the nodes of queue gpu have 8 at most",)),
        ((BIG, SMALL), {"walltime_s": 3601}, ("walltime='01:00:01', but queue gpu has a limit of 01:00:00",)),
        ((BIG, SMALL), {"tasks_per_node": 8, "cpus_per_task": 9}, ("72 cores .* gpu have 64 at most",)),
        ((BIG, SMALL), {"memory_per_node_bytes": 501 * GIB}, ("memory='501.0 GiB', .* gpu have 500.0 GiB at most",)),
        ((BIG, SMALL), {"nodes": 3, "gpus_per_node": 8}, ("nodes=3, but only 2 of the 12 nodes of queue gpu have",)),
        # of several queues one is enough, and the nearest miss is said
        ((BIG, LONG), {"nodes": 3, "walltime_s": 7200}, ()),
        ((BIG, LONG), {"nodes": 5, "walltime_s": 7200}, ("nodes=5, but queue long has 3",)),
        # what is not known is no reason
        ((Offer(queue="x", nodes=9),), {"gpus_per_node": 99, "memory_per_node_bytes": GIB, "walltime_s": 10**6}, ()),
        ((), {"nodes": 99}, ()),
    ],
)
def test_shortfalls_name_the_keyword(offers: tuple[Offer, ...], asked: dict[str, Any], texts: tuple[str, ...]) -> None:
    for text, pattern in zip(shortfalls(job(**asked), offers), texts, strict=True):
        assert re.match(pattern, text)


@given(OFFERS, st.integers(1, 4), st.integers(0, 8), st.integers(1, 8))
def test_shortfalls_never_refuse_what_fits(offers: list[Offer], nodes: int, gpus: int, tasks: int) -> None:
    def takes(queue: str) -> bool:
        fit = [o for o in offers if o.queue == queue]
        able = [o.nodes for o in fit if (o.gpus is None or o.gpus >= gpus) and (o.cpus is None or o.cpus >= tasks)]
        return sum(able) >= nodes <= 3

    asked = job(nodes=nodes, gpus_per_node=gpus, tasks_per_node=tasks)
    assert (shortfalls(asked, offers) == ()) == any(takes(o.queue) for o in offers)


@given(st.one_of(SLURM_IDS, PBS_IDS), st.integers(0, 99), st.integers(0, 999))
def test_a_name_says_what_it_was_made_of(job_id: str, restart_count: int, index: int) -> None:
    name = member_worker_name(job_id, restart_count, index)
    assert read_member_name(name) == (job_id, restart_count, index)


@pytest.mark.parametrize(
    ("name", "job_id"),
    [
        ("123_4-0", "123_4"),
        ("123_4-0r1", "123_4"),
        ("17[4].server-0", "17[4].server"),
        ("17.master1-0", "17.master1"),  # a server whose name ends like a restart
        ("17.pbs-0r1-3", "17.pbs-0r1"),
        *((name, None) for name in ("node1-0", "gpu-17-3", "123_4", "123_4-", "123_4-r1", "-0", "", "१२-0", "17[]-0")),
    ],
)
def test_read_member_name(name: str, job_id: str | None) -> None:
    member = read_member_name(name)
    assert (member[0] if member else None) == job_id


@given(st.text(max_size=20))
def test_read_member_name_of_any_text(text: str) -> None:
    member = read_member_name(text)
    assert not member or read_member_name(member_worker_name(*member)) == member


def test_count_by_job() -> None:
    names = ["node1-0", "node1-1", "7-0", "7-1r1", "8-0", "1234-0"]  # the last of a node of that name
    assert count_by_job(names, {"7", "8"}, "6") == {"6": 3, "7": 2, "8": 1}
