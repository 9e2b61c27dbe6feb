"""A cluster as HTML: well formed whatever it is called, bars that stay in their tracks, readable with 400 workers."""

from dataclasses import replace
from html.parser import HTMLParser

from hypothesis import given
from hypothesis import strategies as st

from hpcgpu.model import Binding, CpuSet, Gpu, WorkerSpec
from hpcgpu.plan.jobs.job import Job
from hpcgpu.report.table import Explanation
from hpcgpu.report.workers import Bindings, Memory, WorkerFacts, cluster_page, jobs_table, planned

VOID = {"br", "meta"}
GPU = Gpu(pci="0000:17:00.0", uuid="GPU-1", vendor="nvidia", model="H200", memory_bytes=141 << 30)
SPEC = WorkerSpec(name="n7-0", binding=Binding(CpuSet({0, 1, 2, 3}), (GPU,)))
JOB = Job(id="4711", text="UP 1/1")
sizes = st.integers(0, 1 << 40)
jobs = st.builds(Job, id=st.text(), text=st.text(), log=st.text())


class Reader(HTMLParser):
    """Text, tags and widths of a page; AssertionError where tags do not nest."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.text, self.tags, self.widths, self._open = "", [], [], []
        self.feed(page)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in VOID:
            self._open.append(tag)
        style = dict(attrs).get("style") or ""
        if tag == "i":
            self.widths.append(float(style.partition("width: ")[2].partition("%")[0]))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if "style" not in self._open:
            self.text += data


def facts(name: str = "n7-0", node: str = "n7", **more: object) -> WorkerFacts:
    limits = {"device_capacity_bytes": 100 << 20, "device_limit_bytes": 80 << 20}
    return WorkerFacts(name=name, node=node, **{**planned(SPEC), **limits, **more})


workers = st.builds(
    facts,
    name=st.text(),
    node=st.text(),
    differences=st.tuples(st.text()),
    tiers=st.just({}) | st.fixed_dictionaries(dict.fromkeys(("device", "host", "disk"), sizes)),
    process_bytes=sizes,
    **dict.fromkeys(("device_used_bytes", "device_limit_bytes", "device_capacity_bytes"), st.none() | sizes),
    host_limit_bytes=st.none() | sizes,
)


@given(st.text(), st.text(), st.text(), st.lists(jobs), st.lists(workers).map(tuple))
def test_notebook_page_of_any_name_is_well_formed_and_bars_fit(name, state, link, jobs, workers) -> None:
    page = Reader(cluster_page("SLURMGPUCluster", name, state, link, jobs_table(jobs), workers, 3))
    assert all(0 <= width <= 100 for width in page.widths)
    assert "script" not in page.tags
    Reader(Memory(workers)._repr_html_())
    Reader(Bindings(workers)._repr_html_())
    Reader(jobs_table(jobs).html())


def test_what_users_are_called_is_text() -> None:
    evil = "<script>alert(1)</script>"
    jobs = jobs_table([Job(id=evil, text=evil, log=evil)])
    page = cluster_page("X", evil, evil, '"onclick=', jobs, (facts(evil, differences=(evil,)),), 1, f" (ssh {evil})")
    assert "<script" not in page
    assert 'href="&quot;onclick="' in page
    assert "</a> (ssh &lt;script&gt;" in page


def test_a_cluster_says_what_it_has() -> None:
    worker = facts(tiers={"device": 50 << 20}, process_bytes=1 << 30)
    page = Reader(cluster_page("X", "mine", "running", "http://here", jobs_table([JOB]), (worker,), 2))
    for words in ("Workers: 1 of 2 on 1 GPU, 1 node", "50.0 MiB of 100.0 MiB (limit 80.0 MiB)", "4711", "UP 1", "H200"):
        assert words in page.text.replace("\xa0", " "), words
    assert page.widths[:2] == [50.0, 50.0]
    assert "NIC" not in page.text  # no worker has one


def test_a_difference_from_the_plan_is_seen() -> None:
    page = Bindings((facts(differences=("2 of 9 threads may run on PUs 0",)),))._repr_html_()
    assert '<div class="bad">not as planned: 2 of 9 threads may run on PUs 0</div>' in page
    assert "1 of 1 workers not as planned" in page


def test_bindings_say_once_what_all_workers_share() -> None:
    obstacles = ("", "node_copies=False", "kernel.yama.ptrace_scope=2", "node_copies=False")
    few = {"spec": SPEC, "reasons": ("1 core for 4 workers",)}
    found = Bindings(tuple(facts(f"n{i}-0", f"n{i}", node_copies=why, **few) for i, why in enumerate(obstacles)))
    ways = "by one copy, by the connection (kernel.yama.ptrace_scope=2), by the connection (node_copies=False)"
    shared, _, *last = found.table.notes
    assert (shared, last) == ("each worker: 1 core for 4 workers", [f"large values within a node: {ways}"])
    assert str(found).count("1 core for 4 workers") == 1


def test_400_workers_are_folded_and_cut() -> None:
    many = tuple(facts(f"n{i}-0", f"n{i}") for i in range(400))
    page = cluster_page("X", "mine", "running", "", jobs_table([]), many, 400)
    assert "<details><summary>" in page
    assert "n0-0 and 399 alike" in page
    different = [replace(w, cores=w.name, differences=("cores",) if w.name == "n7-0" else ()) for w in many]
    text = str(Bindings(tuple(different)))
    assert text.splitlines()[1].startswith("n7-0")
    assert "and 336 more rows: to_json() has all" in text
    assert len(page) < 150_000


def test_4000_workers_and_1000_jobs_stay_on_a_screen() -> None:
    many = tuple(
        facts(f"n{i // 8}-{i % 8}", f"n{i // 8}", tiers={"device": i << 20}, process_bytes=i << 20) for i in range(4000)
    )
    rows = [replace(JOB, id=f"{i}", log=f"/home/ada/{i}.out") for i in range(1000)]
    for shown in (Bindings(many), Memory(many), jobs_table(rows)):
        text = shown.to_text() if hasattr(shown, "to_text") else str(shown)
        assert len(text.splitlines()) < 160
    page = cluster_page("X", "mine", "running", "", jobs_table(rows), many, 4000)
    assert len(page) < 150_000
    assert "0 and 999 alike" in page
    assert "Workers: 4000 on" in Reader(page).text.replace("\xa0", " ")


def test_an_explanation_is_shown_as_it_is() -> None:
    text = Explanation("a < b\nc")
    assert repr(text) == str(text) == "a < b\nc"
    assert "<pre>a &lt; b\nc</pre>" in text._repr_html_()
    assert isinstance(text, str)
