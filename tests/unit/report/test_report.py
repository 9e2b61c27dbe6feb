"""Tables, the summary of a run, a job before it is submitted, and texts without private names."""

import json
import re
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paths import ROOT

from hpcgpu.deploy.bug_report import Scrubber
from hpcgpu.model import JobSpec, Settings, Site
from hpcgpu.model.allocation import Limits
from hpcgpu.model.site import Charge, Network, Queue, Source
from hpcgpu.plan.jobs.needs import shared_imports
from hpcgpu.report import job as preview
from hpcgpu.report.energy import EnergyCounter
from hpcgpu.report.job import Preview, layout_of
from hpcgpu.report.summary import Summary, covered_s, sum_up
from hpcgpu.report.table import Column, Table
from hpcgpu.report.workers import Moved, WorkerFacts, examine
from hpcgpu.topology import hwloc_xml

COLUMNS = (Column("name", kind="name"), Column("state", styles={"UP": "green"}), Column("size", "B", "number"))
COLUMNS += (Column("why", kind="note", mark="-> "),)
TABLE = Table(COLUMNS, [("a b", "UP", 1 << 20, ["x"]), ("c", "out\nof order", None, "")], "title", ["a note"])
words = st.text("ab1,", min_size=1, max_size=12)
texts = st.lists(words, max_size=6).map(" ".join)
WORDS = st.text("abhostuser01-", min_size=3, max_size=8).filter(lambda w: w not in ("user", "root", "host"))
GIB = 1 << 30
USED = Summary(
    wall_s=3600,
    walltime_s=7200,
    gpus=4,
    workers=4,
    gpu_s=14400,
    idle_gpu_s=1440,
    busy_share=0.9,
    moved_bytes={"device_to_host": 0},
    peak_bytes={"device": 10 * GIB, "host": GIB, "disk": 0, "process": 30 * GIB},
    limit_bytes={"device": 16 * GIB, "process": 60 * GIB},
)
SITE = Site(
    name="here",
    batch="slurm",
    sources={"D": Source(title="the guide", date="2026-08")},
    queues=(Queue(name="gpu", charge=2.0), Queue(name="plain")),
    network=Network(kind="slingshot", ucx=False, source="D"),
    charge=Charge(unit="SU", per_node_hour=3.0, source="D"),
)
SPEC = JobSpec(name="a", argv=("hpcgpu",), nodes=2, tasks_per_node=4, gpus_per_node=4, walltime_s=7200, queue="gpu")


def test_table_is_text_html_and_json() -> None:
    rows = ["a b   UP              1.0 MiB", "    -> x", "c     out / of order        -"]
    assert TABLE.to_text().splitlines() == ["title", "name  state              size", *rows, "a note"]
    assert "\x1b[32mUP " in TABLE.to_text(colours=True)
    assert "\n    state  out / of\n           order\n" in TABLE.to_text(19)
    assert TABLE.to_json()[0] == {"name": "a b", "state": "UP", "size": 1 << 20, "why": ["x"]}
    assert '<td>a b<div class="dim">-&gt; x</div></td><td>UP</td><td>1.0 MiB</td>' in TABLE.html()


@given(st.lists(st.tuples(words, texts, st.none() | st.integers(0, 1 << 40), st.lists(texts))), st.integers(16, 120))
def test_table_fits_any_width_and_breaks_no_word(rows: list[tuple[str, str, int, list[str]]], width: int) -> None:
    text = Table(COLUMNS, rows).to_text(width)
    assert [line for line in text.splitlines() if len(line) > width and len(line.split()) > 1] == []
    shown = {word for row in rows for word in (row[0], *row[1].split(), *" ".join(row[3]).split())}
    assert shown <= set(text.split())


@given(st.dictionaries(st.sampled_from(["user", "host", "path"]), st.lists(WORDS, max_size=3)), st.data())
def test_nothing_of_the_words_remains(words: dict[str, list[str]], data: st.DataObject) -> None:
    secrets = [word for found in words.values() for word in found if word.lower() not in ("users",)]
    parts = st.lists(st.sampled_from([*secrets, "a", "host1", " ", "user", "x"]))
    text = "".join(data.draw(parts))
    scrubbed = Scrubber(words).scrub(text)
    assert not [word for word in secrets if word in scrubbed]


@pytest.mark.parametrize(
    ("text", "scrubbed"),
    [
        ("tls://10.3.4.5:8786 and 10.3.4.5", "tls://ip1:8786 and ip1"),
        ("10.0.0.1 10.0.0.2 10.0.0.1", "ip1 ip2 ip1"),
        ("127.0.0.1 0.0.0.0 hwloc 2.9.0", "127.0.0.1 0.0.0.0 hwloc 2.9.0"),
        ("[fe80::1:2]:80 at 10:20:30", "[ip1]:80 at 10:20:30"),
        ("3c:ec:ef:12:34:56", "mac1"),
        ("0000:41:00.0 GPU-3b2f9a10-1111-2222-3333-444455556666", "0000:41:00.0 GPU-uuid1"),
        ("/u/ada/x of ada@site.edu on n12.site.edu", "path1/x of mail1 on host1"),
        ("job of ada on n12, ada's", "job of user1 on host2, user1's"),
        ("API_TOKEN=abc HF_TOKEN: 'x'", "API_TOKEN=(secret) HF_TOKEN: '(secret)'"),
        ('{"env": [["MY_SECRET", "s3"]]}', '{"env": [["MY_SECRET", "(secret)"]]}'),
        ("-----BEGIN PRIVATE KEY-----\nabc\n-----END PRIVATE KEY-----\n", "(a key or certificate was here)\n"),
    ],
)
def test_forms(text: str, scrubbed: str) -> None:
    words = {"user": ["ada"], "host": ["n12", "n12.site.edu"], "path": ["/u/ada"]}
    scrubber = Scrubber(words)
    if "host2" in scrubbed:
        scrubber.scrub("n12.site.edu")
    assert scrubber.scrub(text) == scrubbed


@pytest.mark.parametrize("name", ["turin-4gpu-nvml", "coral-lassen", "nvidiaDGX2"])
def test_a_scrubbed_topology_is_the_same_machine(name: str) -> None:
    text = (ROOT / "tests" / "data" / "topology" / f"{name}.xml").read_text()
    scrubbed = Scrubber({}).scrub(text)
    before, after = hwloc_xml.read_file(text), hwloc_xml.read_file(scrubbed)
    assert [(g.pci, g.numa_node, g.model) for g in before.gpus] == [(g.pci, g.numa_node, g.model) for g in after.gpus]
    assert (before.cores, before.nics, before.numa_nodes) == (after.cores, after.nics, after.numa_nodes)
    assert not [uuid for uuid in re.findall(r"GPU-[0-9a-f-]{36}", text) if uuid in scrubbed]


def usage(name: str, begin_s: float, end_s: float, busy_s: float, **more: object) -> WorkerFacts:
    return WorkerFacts(name=name, node="n", gpu=f"GPU-{name}", begin_s=begin_s, end_s=end_s, busy_s=busy_s, **more)


def test_summary_adds_up_the_usage_of_all_workers() -> None:
    usages = [
        usage("0", 0, 40, 20, moved={"device_to_host": Moved(5)}, peaks={"device": 7}, device_limit_bytes=9),
        usage("0", 50, 100, 50, moved={"device_to_host": Moved(6)}, peaks={"device": 3}, device_limit_bytes=9),
        usage("1", 0, 100, 0),
        WorkerFacts(name="cpu0", begin_s=0, end_s=100, busy_s=0),
    ]
    summary = sum_up(usages, 110, 600)
    assert (summary.gpus, summary.workers, summary.restarts) == (2, 3, 1)
    assert (summary.gpu_s, summary.idle_gpu_s) == (190, 120)
    assert summary.busy_share == pytest.approx(70 / 190)
    assert summary.moved_bytes["device_to_host"] == 11
    assert (summary.peak_bytes["device"], summary.limit_bytes["device"]) == (7, 9)
    assert sum_up([], 1).busy_share is None


def test_workers_that_share_a_gpu_hold_it_once() -> None:
    shared = [replace(usage(name, 0, 10, 8), gpu="GPU-0") for name in "ab"]
    summary = sum_up(shared, 10)
    assert (summary.gpus, summary.gpu_s, summary.idle_gpu_s) == (1, 10, 0)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans(), st.integers(0, 9)), max_size=20))
def test_energy_of_workers_that_share_a_gpu_counts_once(steps: list[tuple[str, bool, int]]) -> None:
    """Workers come and go; the GPU uses energy between; what it used while one was there is the sum."""
    counter, present, used, covered = EnergyCounter(), dict[str, int](), 0, 0
    for name, stays, joules in steps:
        for worker, begin in present.items():
            counter.note(worker, used - begin)
        if stays and name not in present:
            present[name] = used
            counter.note(name, 0)
        elif not stays and present.pop(name, None) is not None:
            counter.leave(name)
        used += joules
        covered += joules if present else 0
    for worker, begin in present.items():
        counter.note(worker, used - begin, used - begin)
    assert counter.joules == covered
    assert 0 <= counter.busy_joules <= counter.joules


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)).map(lambda x: (min(x), max(x)))))
def test_the_union_of_intervals(found: list[tuple[int, int]]) -> None:
    assert covered_s(found) == len({second for begin, end in found for second in range(begin, end)})


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, ""),
        ({"busy_share": 0.2}, "1 GPU in place of 4"),
        ({"busy_share": 0.45}, "3 GPUs in place of 4"),
        ({"busy_share": 0.2, "moved_bytes": {"device_to_host": 1}}, ""),
        ({"wall_s": 30.0, "busy_share": 0.2}, ""),
        ({"wall_s": 600.0}, "a time limit of 00:15:00 in place of 02:00:00"),
        ({"wall_s": 7000.0}, "a longer time limit"),
        ({"peak_bytes": {"process": 4 * GIB}}, "less host memory: 6.0 GiB for each worker in place of 60.0 GiB"),
        ({"peak_bytes": {"process": 59 * GIB}}, "more host memory: a worker's process took 59.0 GiB of 60.0 GiB"),
        ({"peak_bytes": {"process": 4 * GIB, "disk": GIB}}, "more host memory, or more GPUs: up to 1.0 GiB"),
        ({"peak_bytes": {"process": 4 * GIB, "disk": 4096}}, ""),
    ],
)
def test_advice(changed: dict[str, object], said: str) -> None:
    advice = replace(USED, **changed).advice
    assert advice == () if not said else advice[0].startswith(said) and len(advice) == 1


def test_lines_and_json() -> None:
    summary = replace(USED, busy_share=0.2, restarts=1)
    text = str(summary)
    assert text.startswith("01:00:00 with 4 GPUs, 4.00 GPU hours, a task ran in 20% of the workers' time, ")
    assert "24.0 GPU minutes idle, 1 worker started anew\n" in text
    assert "device 10.0 GiB (limit 16.0 GiB)" in text
    assert "nothing was spilled\nnext time: 1 GPU in place of 4" in text
    found = json.loads(summary.as_json())
    assert (found["gpu_hours"], found["idle_gpu_minutes"], found["busy_share"]) == (4, 24, 0.2)
    assert (found["energy_kwh"], found["carbon_g"]) == (None, None)
    assert "energy" not in text
    assert Summary(**asdict(summary)) == summary


def test_summary_says_its_energy_and_its_carbon() -> None:
    energy = {"gpu_energy_j": 3.6e6, "idle_gpu_energy_j": 0.9e6, "cpu_energy_j": 1.8e6, "carbon_g_per_kwh": 300.0}
    summary = replace(USED, **energy)
    gpus, cpus = "1 kWh by the 4 GPUs, 25% of it while no task ran", "0.5 kWh by the nodes' CPUs"
    assert f"\nenergy: {gpus}; {cpus}; 450 g of CO2 at 300 g/kWh\n" in str(summary)
    found = json.loads(summary.as_json())
    assert (found["energy_kwh"], found["carbon_g"], found["gpu_energy_j"]) == (1.5, 450, 3.6e6)
    assert f"\nenergy: {cpus}\n" in str(replace(USED, cpu_energy_j=1.8e6))


@pytest.mark.parametrize(
    ("source", "used", "told"),
    [
        ("NVML", (10, 10), ""),
        ("NVML", (11, 11), "3.0 GiB of 10.0 GiB on its GPU are not Dask's data, which may have 8.0 GiB"),
        ("pool", (5, 5), ""),
        ("pool", (5, 6), "3.0 GiB of 10.0 GiB on its GPU"),
    ],
)
def test_gpu_that_others_have_filled_is_a_finding(source: str, used: tuple[int, int], told: str) -> None:
    """Two workers share a GPU, which NVML counts as a whole; each has 4 GiB of Dask's data, as its limit is."""
    sizes = {"tiers": {"device": 4 * GIB}, "device_limit_bytes": 4 * GIB, "device_capacity_bytes": 5 * GIB}
    facts = {**sizes, "gpu": "GPU-a", "device_source": source}
    found = examine([WorkerFacts(name=str(i), device_used_bytes=n * GIB, **facts) for i, n in enumerate(used)])
    assert [result.seen.startswith(told) for result in found[:-1]] == [True] * bool(told)
    assert found[-1].seen == f"{1 if told else 2} worker{'' if told else 's'} as planned"


def planned(spec: JobSpec = SPEC, site: Site | None = SITE) -> Preview:
    return Preview(
        settings=Settings(queue="gpu", sources={"queue": "option --queue"}),
        spec=spec,
        script="#!/bin/bash\nhpcgpu\n",
        site=site,
        layout=layout_of(Settings(), spec.nodes, 4),
        node=None,
        node_from="nobody says it",
    )


@given(st.integers(1, 20), st.integers(1, 8), st.sampled_from(["gpu", "node"]), st.integers(1, 3), st.integers(0, 2))
def test_layout_has_all_workers_and_rank_0_first(nodes: int, gpus: int, ranks: str, each: int, beside: int) -> None:
    layout = layout_of(Settings(ranks=ranks, workers_per_gpu=each, cpu_workers=beside), nodes, gpus)
    assert layout.worker_count == nodes * (gpus * each + beside)
    assert layout.nodes[0].ranks[0] == 0
    assert sum(len(node.ranks) for node in layout.nodes) == (nodes * gpus + 1 if ranks == "gpu" else nodes)
    assert all(not node.idle for node in layout.nodes)


def test_cost_has_nodes_hours_queue_rule_and_source() -> None:
    assert preview.cost(planned()) == (
        "about 24 SU if it runs to its limit of 02:00:00: 3 for a node and hour times 2 in gpu (the guide, 2026-08)"
    )
    by_gpu = replace(SITE, charge=Charge(per_gpu_hour=0.5, source="D"))
    assert preview.cost(planned(replace(SPEC, queue="plain"), by_gpu)) == (
        "about 8 units if it runs to its limit of 02:00:00: 0.5 for a GPU and hour (the guide, 2026-08)"
    )


@pytest.mark.parametrize("spec", [replace(SPEC, walltime_s=None), SPEC])
def test_no_cost_is_invented(spec: JobSpec) -> None:
    site = SITE if spec.walltime_s is None else replace(SITE, charge=Charge(text="ask them"))
    assert preview.cost(planned(spec, site)) == ""
    assert preview.cost(planned(site=None)) == ""


def test_a_poor_request_says_what_to_write() -> None:
    said = preview.warnings(planned(replace(SPEC, walltime_s=None)))
    assert [text.rpartition(" ")[2] for text in said[:1]] == ["cores_per_gpu="]
    assert "4 cores for 4 GPUs" in said[0]
    assert "memory=" in said[1]
    assert "walltime=" in said[2]
    good = replace(SPEC, cpus_per_task=8, memory_per_node_bytes=1 << 38)
    assert preview.warnings(planned(good)) == []
    whole = replace(SITE, dialect={"cpus": False, "memory": "none"})
    assert preview.warnings(planned(site=whole)) == []


def test_plan_of_many_nodes_warns_of_limits_and_imports() -> None:
    spec = replace(SPEC, nodes=250)
    poor = replace(planned(spec), limits=Limits(files=1024), imports=shared_imports(250, "lustre"))
    short, imports = preview.warnings(poor)[-2:]
    assert short.startswith(
        "1,000 workers need 2,266 open files of the scheduler; the hard limit (ulimit -Hn) is 1,024"
    )
    assert "here; nodes may have another one" in short
    assert re.match(r"250 nodes import at least [\d,]+ files each from lustre: environment='stage' ", imports)
    assert re.search(r"open files of the scheduler +2,\d+  1,024, hard limit", preview.render(poor))
    assert preview.described(poor)["needs"][0]["limit"] == 1024
    assert len(preview.render(poor, 120).splitlines()) < 60, "the plan of 1,000 workers stays on a screen"


def test_plan_equals_itself_and_differences_have_paths() -> None:
    before = json.loads(json.dumps(preview.described(planned())))
    assert preview.differences(before, before) == ()
    other = replace(planned(replace(SPEC, nodes=3, walltime_s=3600)), script="#!/bin/bash\nhpcgpu --other\n")
    found = preview.differences(before, json.loads(json.dumps(preview.described(other))))
    assert "request.nodes: 2 (default) -> 3 (default)" in found
    assert "script: -hpcgpu" in found
    assert "script: +hpcgpu --other" in found
    assert any(line.startswith("estimates: ") or line.startswith("estimates[1]: ") for line in found)


def test_the_text_has_all_sections_in_their_order() -> None:
    text = preview.render(planned())
    heads = [line.removesuffix(":") for line in text.splitlines() if line and not line.startswith(" ")]
    assert heads == [
        "settings",
        "request",
        "layout",
        "node",
        "memory",
        "network",
        "needs",
        "estimates",
        "warnings",
        "script",
    ]
    assert "  slingshot, for which UCX has no transport (the guide, 2026-08)" in text
