"""What a cluster needs of the system, beside what limits allow."""

from hypothesis import given
from hypothesis import strategies as st

from hpcgpu.model import Layout, NodeLayout
from hpcgpu.model.allocation import Limits
from hpcgpu.plan.jobs.needs import Size, needs, shared_imports, shortages

counts = st.integers(1, 20_000)
limits = st.builds(Limits, **dict.fromkeys(("files", "processes", "job_processes", "ports"), st.integers(-1, 1 << 20)))


@given(counts, counts, st.integers(1, 64), limits)
def test_needs_grow_with_the_cluster_and_every_shortage_is_named(few, more, per_node, limits) -> None:
    smaller, larger = (Size(n, -(-n // per_node), per_node) for n in sorted((few, few + more)))
    before, after = needs(smaller, limits), needs(larger, limits)
    assert all(a.number <= b.number for a, b in zip(before, after, strict=True))
    assert sum(need.is_short for need in after) == len(shortages(larger, limits))
    assert set(shortages(larger, limits)) == {
        text for exact in (True, False) for text in shortages(larger, limits, exact=exact)
    }
    assert len(shortages(smaller, limits)) <= len(shortages(larger, limits))


def test_shortage_names_workers_need_and_limit() -> None:
    (text,) = shortages(Size(1000, 125, 8), Limits(files=1024, processes=-1, job_processes=-1))
    assert text == "1,000 workers need 2,141 open files of the scheduler; the hard limit (ulimit -Hn) is 1,024"
    assert shortages(Size(1000, 125, 8), Limits()) == ()
    assert Size.of(Layout(())) == Size(0, 0, 0)  # of a scheduler alone


def test_size_of_a_layout_is_all_workers_and_the_fullest_node() -> None:
    nodes = (NodeLayout(0, (0, 1), ((), (0, 1))), NodeLayout(1, (2,), ((0, 1, 2),)))
    assert Size.of(Layout(nodes)) == Size(workers=5, nodes=2, per_node=3)


def test_imports_of_few_nodes_are_not_worth_a_hint() -> None:
    assert shared_imports(2, "lustre") == ""
    assert shared_imports(32, "lustre").startswith("32 nodes import ")
