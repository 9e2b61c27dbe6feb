"""Jobs that ask for more than there is."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcgpu.model import JobSpec, Offer
from hpcgpu.plan.jobs.request import shortfalls

GIB = 1 << 30
BIG = Offer(queue="gpu", nodes=2, gpus=8, cpus=64, memory_bytes=500 * GIB, most_nodes=4, walltime_s=3600)
SMALL = Offer(queue="gpu", nodes=10, gpus=4, cpus=32, memory_bytes=200 * GIB, most_nodes=4, walltime_s=3600)
LONG = Offer(queue="long", nodes=3, gpus=4, cpus=32, memory_bytes=200 * GIB)


def job(**asked: Any) -> JobSpec:
    return JobSpec(name="a", argv=("true",), **asked)


@pytest.mark.parametrize(
    ("offers", "asked", "texts"),
    [
        ((BIG, SMALL), {"nodes": 4, "gpus_per_node": 4, "walltime_s": 3600}, ()),
        ((BIG, SMALL), {"nodes": 5}, ("nodes=5, but queue gpu gives a job 4 at most",)),
        ((LONG,), {"nodes": 4}, ("nodes=4, but queue long has 3",)),
        ((BIG, SMALL), {"gpus_per_node": 9}, ("gpus_per_node=9, but the nodes of queue gpu have 8 at most",)),
        ((BIG, SMALL), {"walltime_s": 3601}, ("walltime=01:00:01, but queue gpu has a limit of 01:00:00",)),
        (
            (BIG, SMALL),
            {"tasks_per_node": 8, "cpus_per_task": 9},
            ("72 cores of each node (cores_per_gpu= of each GPU), but the nodes of queue gpu have 64 at most",),
        ),
        (
            (BIG, SMALL),
            {"memory_per_node_bytes": 501 * GIB},
            ("memory=501.0 GiB, but the nodes of queue gpu have 500.0 GiB at most",),
        ),
        (
            (BIG, SMALL),
            {"nodes": 3, "gpus_per_node": 8},
            ("nodes=3, but only 2 of the 12 nodes of queue gpu have the requested resources",),
        ),
        # of several queues one is enough, and the nearest miss is said
        ((BIG, LONG), {"nodes": 3, "walltime_s": 7200}, ()),
        ((BIG, LONG), {"nodes": 5, "walltime_s": 7200}, ("nodes=5, but queue long has 3",)),
        # what is not known is no reason
        ((Offer(queue="x", nodes=9),), {"gpus_per_node": 99, "memory_per_node_bytes": GIB, "walltime_s": 10**6}, ()),
        ((), {"nodes": 99}, ()),
    ],
)
def test_shortfalls_name_the_keyword(offers: tuple[Offer, ...], asked: dict[str, Any], texts: tuple[str, ...]) -> None:
    assert shortfalls(job(**asked), offers) == texts


SOME = st.none() | st.integers(1, 8)
OFFERS = st.lists(
    st.builds(Offer, queue=st.sampled_from("ab"), nodes=st.integers(1, 4), gpus=SOME, cpus=SOME, most_nodes=st.just(3)),
    min_size=1,
    max_size=4,
)


@given(OFFERS, st.integers(1, 4), st.integers(0, 8), st.integers(1, 8))
def test_shortfalls_never_refuse_what_fits(offers: list[Offer], nodes: int, gpus: int, tasks: int) -> None:
    def takes(queue: str) -> bool:
        fit = [o for o in offers if o.queue == queue]
        able = [o.nodes for o in fit if (o.gpus is None or o.gpus >= gpus) and (o.cpus is None or o.cpus >= tasks)]
        return sum(able) >= nodes <= 3

    asked = job(nodes=nodes, gpus_per_node=gpus, tasks_per_node=tasks)
    assert (shortfalls(asked, offers) == ()) == any(takes(o.queue) for o in offers)
