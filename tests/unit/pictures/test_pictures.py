"""The picture of a node: nothing missing, nothing twice, no overlaps, no text out of its box."""

import itertools
import runpy
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence

import pytest
from golden import check_golden
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import GIB, MACHINES, gpus_of, machine
from paths import ROOT

from hpcgpu.model import Binding, CpuSet, Gpu, Nic, NumaNode, Topology
from hpcgpu.pictures.layout import WIDTH, lay_out, node_of, render_svg
from hpcgpu.pictures.shapes import COLOURS, FADED, INK, Box, Tile, text_width, walk, wrap
from hpcgpu.plan.binding.bindings import plan_bindings

SVG = "{http://www.w3.org/2000/svg}"


def planned(topology: Topology) -> tuple[Binding, ...]:
    return plan_bindings(topology, gpus_of(topology), CpuSet(pu for c in topology.cores for pu in c))


def groups(svg: str, kind: str) -> list[ET.Element]:
    return [g for g in ET.fromstring(svg).iter(f"{SVG}g") if g.get("class", "").split(" ")[0] == kind]


def fill(group: ET.Element) -> str:
    return group.find(f"{SVG}rect").get("fill")


def words(element: ET.Element) -> list[str]:
    return [t.text or "" for t in element.iter(f"{SVG}text")]


@pytest.mark.parametrize("name", MACHINES)
def test_every_core_gpu_port_and_memory_is_there_once(name: str) -> None:
    topology = machine(name)
    svg = render_svg(topology, planned(topology))
    titles = [g.find(f"{SVG}title").text for g in groups(svg, "core")]
    drawn = sorted(str(CpuSet.parse(t.split(":")[0].split(" ")[1])) for t in titles)
    assert drawn == sorted(map(str, topology.cores))
    shown = sorted(next(w for w in " · ".join(words(g)).split(" · ") if ":" in w) for g in groups(svg, "gpu"))
    assert shown == sorted(g.pci for g in gpus_of(topology))
    ports = [n.name if n.name == n.interface else f"{n.name}:{n.port}" for n in topology.nics]
    assert sorted(words(g)[0] for g in groups(svg, "port")) == sorted(ports)
    assert len(groups(svg, "node")) == len(topology.numa_nodes)
    assert len(groups(svg, "memory")) == len(topology.other_memory)
    check(laid_out(topology, planned(topology)))
    # it needs no other file
    assert {e.tag.removeprefix(SVG) for e in ET.fromstring(svg).iter()} <= {
        *["svg", "g", "title", "rect", "path", "text"]
    }
    assert not [k for e in ET.fromstring(svg).iter() for k in e.attrib if "href" in k or k == "style" or k[:2] == "on"]


def test_cores_of_no_worker_are_plain_and_of_several_show_each() -> None:
    topology = machine("coral-lassen")
    bindings = plan_bindings(topology, topology.gpus, CpuSet(range(8, 48)))
    svg = render_svg(topology, bindings)
    free = [g for g in groups(svg, "core") if not g.get("data-workers")]
    assert len(free) == 30
    assert {fill(g) for g in free} == {"#FFFFFF"}
    assert not [w for g in free for w in words(g)]
    assert "core of no worker" in svg
    assert "core of no worker" not in render_svg(topology, planned(topology))
    one = planned(topology)[0]
    gpu = groups(render_svg(topology, [one, one]), "gpu")[0]
    assert [r.get("fill") for r in gpu.findall(f"{SVG}rect[@class='strip']")] == list(COLOURS[:2])
    assert words(gpu)[-2:] == ["0", "1"]
    bindings = plan_bindings(topology, topology.gpus, topology.cores[0])
    (shared,) = (g for g in groups(render_svg(topology, bindings), "core") if g.get("data-workers"))
    tags = [g for g in shared.iter(f"{SVG}g") if g.get("class") == "tag"]
    assert [(fill(g), *words(g)) for g in tags] == [(COLOURS[i], str(i)) for i in range(4)]


def test_parts_of_unknown_place_and_other_memory_have_boxes() -> None:
    topology = machine("coral-lassen")
    lost = topology._replace(
        gpus=tuple(g._replace(numa_node=n) for g, n in zip(topology.gpus, (None, 77, 8, 8), strict=True)),
        nics=(topology.nics[0]._replace(numa_node=77), *topology.nics[1:]),
        other_memory=(NumaNode(9, CpuSet(), GIB, package=5, kind="cxl"),),
    )
    (unknown,) = groups(render_svg(lost, planned(lost)), "unknown")
    inside = [g.get("class") for g in unknown.findall(f"{SVG}g")]
    assert inside == ["gpu", "gpu", "port", "memory"]
    assert not groups(render_svg(topology, planned(topology)), "unknown")
    hbm = NumaNode(1, topology.numa_nodes[0].cpuset, 64 * GIB, package=0, kind="hbm")
    gpu = NumaNode(255, CpuSet(), 0, package=8, kind="gpu")
    svg = render_svg(topology._replace(other_memory=(hbm, gpu)), ())
    first, second = groups(svg, "package")
    assert "NUMA node 1 · 64 GiB" in words(first.find(f"{SVG}g[@class='node']"))
    assert words(second.find(f"{SVG}g[@class='memory']")) == ["NUMA node 255 · ? GiB", "GPU memory"]


def test_a_port_of_no_worker_says_why() -> None:
    topology = machine("turin-4gpu-nvml")
    bindings = plan_bindings(topology, topology.gpus[2:3], topology.cores[0])
    idle = {words(g)[0]: " ".join(words(g)[1:]) for g in groups(render_svg(topology, bindings), "port")}
    assert idle["mlx5_5:1"].endswith("no worker needs it")
    assert idle["eno6"].endswith("plain Ethernet is left to the kernel's routes")
    assert "no worker" not in idle["mlx5_4:1"] + idle["mlx5_0:1"]  # one is used, one is crossed
    named = groups(render_svg(topology, bindings, nics=("mlx5_4",)), "port")
    assert "it is not among the nics asked for" in " ".join(words(named[-1]))
    # without workers no port looks used that no worker would use
    classes = {words(g)[0]: g.get("class") for g in groups(render_svg(topology, ()), "port")}
    assert (classes["mlx5_5:1"], classes["eno6"]) == ("port", "port idle")


def test_empty_numa_nodes_are_one_box() -> None:
    """GB200 has 28 of them for MIG slices."""
    topology = machine("coral-lassen")
    empty = tuple(NumaNode(100 + i, CpuSet(), 0, package=0, kind="other") for i in range(28))
    svg = render_svg(topology._replace(other_memory=(*topology.other_memory, *empty)), ())
    boxes = [words(g) for g in groups(svg, "memory")]
    assert len(boxes) == len(topology.other_memory) + 1
    assert ["28 empty NUMA nodes", "100-127"] in boxes


def test_picture_places_simulated_gpus_and_names_slices() -> None:
    topology = machine("test-topo")
    nodes = groups(render_svg(topology, planned(topology)), "node")
    assert [[w for w in words(n) if w.startswith("GPU")] for n in nodes] == [[f"GPU {i} · simulated"] for i in range(4)]
    topology = machine("coral-lassen")
    slices = tuple(Gpu("0004:04:00.0", f"MIG-{i}", "NVIDIA H200", numa_node=0, mig="1g.18gb") for i in range(2))
    svg = render_svg(topology._replace(gpus=slices), [Binding(topology.cores[0], (slices[1],))])
    drawn = groups(svg, "gpu")
    assert [words(g)[0] for g in drawn] == [f"GPU {i} · NVIDIA H200 MIG 1g.18gb" for i in (0, 1)]
    assert [g.get("data-workers") for g in drawn] == [None, "0"]


def test_legend_says_of_each_worker_what_it_is_tied_to() -> None:
    topology = machine("nvidiaDGX2")._replace(warnings=("something is odd",))
    names = [f"gpu-n7-{i}" for i in range(16)]
    reasons = [("as for all", f"as for {('even', 'odd')[i % 2]}") for i in range(16)]
    bindings = tuple(b._replace(reasons=r) for b, r in zip(planned(topology), reasons, strict=True))
    said = words(ET.fromstring(render_svg(topology, bindings, names)))
    assert set(names) <= set(said)
    assert said.count("4 cores, shared: PUs 0-1,24-25") == 16
    assert "workers 0-15: as for all" in said
    assert "workers 1,3,5,7,9,11,13,15: as for odd" in said
    assert said[-1] == "note: something is odd"


def test_a_node_without_workers_is_still_a_picture() -> None:
    sizes = {text.size for tile in walk([laid_out(machine("opa-hfi"), ())]) for text in tile.texts}
    assert min(sizes) * 840 / WIDTH >= 10  # GitHub shows a README 840 px wide
    with pytest.raises(ValueError, match="1 names for 4 bindings"):
        render_svg(machine("coral-lassen"), planned(machine("coral-lassen")), ["one"])
    svg = render_svg(machine("opa-hfi"), ())
    assert "<title>Machine with 4 cores</title>" in svg
    intel = render_svg(machine("intel-4gpu"), ())
    assert "<title>Machine with 4 GPUs: Intel(R) Data Center GPU Max 1550</title>" in intel
    assert "no worker is planned" in svg
    assert len(groups(svg, "core")) == 4
    assert not groups(svg, "row")


@given(st.text(max_size=40))
@settings(deadline=None, max_examples=60)
def test_any_text_of_a_topology_makes_a_document(text: str) -> None:
    topology = machine("power8gpudistances")
    gpus = tuple(g._replace(model=text, mig=text) for g in topology.gpus)
    parts = {"nics": (Nic(text, "0000:01:00.0", kind=text, interface=text, numa_node=0),), "gpus": gpus}
    parts |= {"other_memory": (NumaNode(9, CpuSet(), GIB, 0, text),)}
    odd = topology._replace(name=text, source=text, warnings=(text,), **parts)
    bindings = tuple(b._replace(reasons=(text,)) for b in planned(odd))
    svg = render_svg(odd, bindings, [text] * 4)
    ET.fromstring(svg.encode())
    check(laid_out(odd, bindings, [text] * 4))


def test_markup_in_names_stays_text() -> None:
    nasty = '</text><script>alert("1")</script>&amp;\x07\n\u202e'
    topology = machine("opa-hfi")._replace(name=nasty, warnings=(nasty,))
    root = ET.fromstring(render_svg(topology, ()))
    assert not list(root.iter(f"{SVG}script"))
    assert root.find(f"{SVG}title").text == nasty.replace("\x07\n\u202e", "\N{REPLACEMENT CHARACTER}" * 3)


def laid_out(topology: Topology, bindings: Sequence[Binding], names: Sequence[str] = ()) -> Tile:
    return lay_out(node_of(topology, bindings, names))


def within(inner: Box, outer: Box) -> bool:
    near = 0.01
    across = outer.x - near <= inner.x and inner.right <= outer.right + near
    return across and outer.y - near <= inner.y and inner.bottom <= outer.bottom + near


def apart(a: Box, b: Box) -> bool:
    return a.right <= b.x + 0.01 or b.right <= a.x + 0.01 or a.bottom <= b.y + 0.01 or b.bottom <= a.y + 0.01


def boxes(texts: Sequence, tiles: Sequence[Tile]) -> Iterator[tuple[str, Box]]:
    yield from ((t.text, t.box) for t in texts if t.text)
    yield from ((t.kind, t.box) for t in tiles)


def check(paper: Tile) -> None:
    """Everything is in the box around it, and no two texts or boxes of one box overlap."""
    for tile in walk([paper]):
        things = list(boxes(tile.texts, tile.inside))
        for what, box in things:
            assert within(box, tile.box), (tile.kind, what, box, tile.box)
        for (what, a), (other, b) in itertools.combinations(things, 2):
            assert apart(a, b), (tile.kind, what, a, other, b)


def test_nothing_overlaps_on_a_large_node() -> None:
    topology = machine("nvidiaDGX2")
    bindings = planned(topology)
    picture = laid_out(topology, bindings * 3, [f"gpu-of-a-node-with-a-long-name-{i}" for i in range(48)])
    check(picture)
    assert {w for t in walk([picture]) for w in t.workers} == set(range(48))


@st.composite
def plans(draw: st.DrawFn) -> tuple[Topology, tuple[Binding, ...]]:
    """A recorded machine, some of its GPUs (some lost), some of its PUs."""
    topology = machine(draw(st.sampled_from(MACHINES)))
    gpus = draw(st.lists(st.sampled_from(gpus_of(topology)), min_size=1, unique=True))
    lost = draw(st.sets(st.sampled_from(gpus)))
    pus = sorted(pu for c in topology.cores for pu in c)
    allowed = draw(st.one_of(st.just(pus), st.lists(st.sampled_from(pus), min_size=1, unique=True)))
    shown = [g._replace(numa_node=None) if g in lost else g for g in gpus]
    if topology.gpus:
        topology = topology._replace(gpus=tuple(shown))
    return topology, plan_bindings(topology, shown, CpuSet(allowed))


@given(plans())
@settings(deadline=None, max_examples=60)
def test_any_plan_on_any_machine_is_a_picture(plan: tuple[Topology, tuple[Binding, ...]]) -> None:
    topology, bindings = plan
    check(laid_out(topology, bindings))
    svg = render_svg(topology, bindings)
    cores = groups(svg, "core")
    assert len(cores) == len(topology.cores)
    assert len(groups(svg, "gpu")) == len(bindings)
    assert len(groups(svg, "port")) == len(topology.nics)
    for i, binding in enumerate(bindings):
        mine = [g for g in cores if str(i) in (g.get("data-workers") or "").split(" ")]
        assert len(mine) == len([c for c in topology.cores if c & binding.cpuset])


@given(st.text(), st.integers(40, 400))
def test_wrapped_lines_fit_and_lose_nothing(text: str, width: int) -> None:
    lines = wrap(text, width, 11)
    assert all(text_width(line, 11) <= width for line in lines)
    assert "".join("".join(lines).split()) == "".join(text.split())


def luminance(colour: str) -> float:
    """Relative luminance (WCAG 2.2)."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def test_text_can_be_read_on_each_of_sixteen_colours_and_in_grey() -> None:
    assert len(set(COLOURS)) == 16
    for colour in COLOURS:
        assert (luminance(colour) + 0.05) / (luminance(INK) + 0.05) >= 4.5
    assert (luminance("#F1F1F1") + 0.05) / (luminance(FADED) + 0.05) >= 4.5


def test_pictures_of_the_documentation_are_what_is_drawn_now() -> None:
    """Look at those that were drawn anew before you commit them."""
    script = runpy.run_path(str(ROOT / "scripts" / "pictures.py"))
    for name in script["MACHINES"]:
        check_golden(script["PICTURES"] / f"{name}.svg", script["picture"](name))
    assert len(list(script["PICTURES"].glob("*.svg"))) == len(script["MACHINES"])
