"""``hpcgpu topo``: what it prints for machines of files, for parts of them, and what differs between nodes."""

import functools
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import ranks
from fake_nvml import FakeGpu, compiled
from machines import lstopo
from paths import TOPOLOGIES
from waiting import scaled

from hpcgpu.model import CpuSet

TURIN = str(TOPOLOGIES / "turin-4gpu-nvml.xml")
refused = functools.partial(ranks.refused, "topo", COLUMNS="0")


def topo(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return ranks.in_process("topo", *words, **{"COLUMNS": "0", **options})


def said(*words: str, **env: str) -> str:
    done = topo(*words, **env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_json_of_a_machine_elsewhere() -> None:
    found = json.loads(said("--from", TURIN, "--json"))
    assert found["source"] == "hwloc XML v2.0"
    assert (found["machine"]["name"], found["machine"]["cores"]) == ("ThinkSystem SD665-N V3", 128)
    worker = found["workers"][1]
    gpu = {"pci": "0000:16:00.0", "vendor": "nvidia", "model": "NVIDIA H200", "numa_node": 2, "mig": None}
    assert worker["gpu"] == {**gpu, "memory_bytes": 146593728 * 1024, "uuid": worker["gpu"]["uuid"]}
    assert worker["cpuset"] == "32-63,160-191"
    assert worker["memory"] == {"policy": "preferred-many", "nodes": "2,3"}  # its GPU's own first
    mlx5_5 = {"name": "mlx5_5", "port": 1, "pci": "0000:e3:00.0", "kind": "infiniband", "state": "active"}
    assert worker["nics"] == [{**mlx5_5, "distance": "machine"}]
    assert (worker["interface"], worker["env"]["UCX_NET_DEVICES"]) == ("ib0", "mlx5_5:1")
    assert any("their ports are down → mlx5_5" in r for r in worker["reasons"])
    ports = {n["name"]: (n["workers"], n["why_not"]) for n in found["nics"]}
    assert ports["mlx5_5"] == (["worker-1", "worker-3"], None)
    assert ports["mlx5_0"] == ([], "its port is down")
    assert ports["eno6"] == ([], "plain Ethernet is left to the kernel's routes")


def test_in_a_job_its_gpus_are_planned(tmp_path: Path) -> None:
    """One GPU of four in the job's cgroup; then CUDA_VISIBLE_DEVICES leaves one of two."""
    machine = {"HWLOC_XMLFILE": TURIN, "COLUMNS": "0", "SLURM_JOB_ID": "7"}
    fakes = [FakeGpu(f"00000000:{bus}:00.0", f"GPU-{i}") for i, bus in enumerate(("16", "E6"))]
    nvml = compiled(tmp_path)

    def topo_there(count: int, *words: str, **env: str) -> str:
        argv = [sys.executable, "-m", "hpcgpu", "topo", *words]
        environ = nvml.environment(fakes[:count]) | machine | env
        return subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=scaled(60), check=False).stdout

    one = topo_there(1)
    assert "\nplanned with GPU 1, which is granted, of 0-3\n" in one
    assert (one.count("\nworker-"), "0000:16:00.0" in one) == (1, True)
    assert "planned with GPUs 1,3, which are granted, of 0-3\n" in topo_there(2)
    both = json.loads(topo_there(2, "--json", CUDA_VISIBLE_DEVICES="1"))["workers"]
    assert [w["gpu"]["pci"] for w in both] == ["0000:e6:00.0"]
    assert "granted, of" not in topo_there(1, "--gpus", "sim:2x1MiB").partition("planned with PUs")[0]


def test_a_table_for_people_and_a_picture(tmp_path: Path) -> None:
    text = said("--from", TURIN, "--svg", str(tmp_path / "node.svg"))
    assert text.startswith("ThinkSystem SD665-N V3: 4 GPUs, 128 cores with 256 PUs, 8 NUMA nodes on 2 packages, 2 of 7")
    assert f"\nread by hwloc XML v2.0, from {TURIN}\n\nworker " in text
    assert "not used: mlx5_0, mlx5_3, mlx5_1, mlx5_2 (their ports are down)" in text
    root = ET.parse(tmp_path / "node.svg").getroot()
    assert root.tag.endswith("svg")
    assert "mlx5_0" in "".join(root.itertext())


def test_a_part_of_a_machine() -> None:
    def cpusets(*words: str) -> list[str]:
        return [w["cpuset"] for w in json.loads(said("--from", TURIN, "--json", *words))["workers"]]

    assert cpusets("--gpus", "0000:06:00.0,3", "--cores", "local") == ["16-31,144-159", "112-127,240-255"]
    assert cpusets("--cpuset", "0-3,64-67") == ["0-1", "2-3", "64-65", "66-67"]
    assert len(cpusets("--workers", "2")) == 2
    assert len(set(cpusets("--workers", "8"))) == len(cpusets("--gpus", "sim:8")) == 8
    assert cpusets("--cores", "2")[0] == "16-17,144-145"
    assert ", with --reserved-cores 4\n" in said("--from", TURIN, "--reserved-cores", "4")


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["--cpuset", "250-300"], "names PUs 256-300; there are PUs 0-255"),
        (["--cpuset", "a-b"], "not a list of PUs"),
        (["--cpuset", "0-99999999999"], "not a list of PUs"),
        (["--gpus", "4"], "there are: 0 at 0000:06:00.0, 1 at 0000:16:00.0"),
        (["--gpus", "GPU-nope"], "which is not there"),
        (["--nics", "mlx5_77"], "ucx, mlx5_0:1"),
        (["--workers", "6"], "a multiple of 4"),
        (["--workers", "0"], "1 to 4"),
        (["--cores", "64"], "more than the 128 cores"),
        (["--from", "nowhere.xml"], "No such file"),
        (["--from", __file__], "not a topology file"),
        ([TURIN], "--from"),
        (["--diff", TURIN], "--diff compares two files"),
        (["--diff", "--workers", "2"], "--workers with --diff"),
        (["--svg", "/none/node.svg"], "--svg /none/node.svg cannot be written: No such file"),
    ],
)
def test_what_is_not_there_is_answered_with_what_is(words: list[str], answer: str) -> None:
    first = [] if words[0] in ("--from", "--diff", TURIN) else ["--from", TURIN]
    # what was typed is right there, and what it names is not
    assert answer in refused(*first, *words, code=1 if words == ["--from", __file__] else 2)


def test_this_machine_without_gpus_says_what_to_type() -> None:
    text = said()
    assert "\nread by " in text
    assert "hpcgpu topo --gpus sim:4" in text or "0000:" in text
    assert len(json.loads(said("--gpus", "sim:2", "--json"))["workers"]) == 2
    assert len(json.loads(said("--json", HPCGPU_GPUS="sim:3"))["workers"]) == 3


@pytest.mark.parametrize(
    ("machine", "gpus"),
    [("epyc-corona.xml", "4 simulated GPUs"), ("turin-4gpu-nvml.xml", "4 GPUs, 4 simulated GPUs")],
)
def test_the_first_line_counts_the_gpus_of_the_table(machine: str, gpus: str) -> None:
    text = said("--from", str(TOPOLOGIES / machine), "--gpus", "sim:4", "--workers", "8")
    assert text.partition(": ")[2].startswith(f"{gpus}, ")
    assert "0 GPUs" not in text


def test_nodes_that_differ(tmp_path: Path) -> None:
    """A port that is dead on one node, names that were given in another order."""
    other = tmp_path / "other.json"
    found = json.loads(said("--from", TURIN, "--json"))
    names = {"mlx5_4": "mlx5_5", "mlx5_5": "mlx5_4"}
    for nic in found["nics"]:
        nic["name"] = names.get(nic["name"], nic["name"])
        nic["state"] = "active" if nic["name"] == "mlx5_0" else nic["state"]
    del found["machine"]["gpus"][3]
    other.write_text(json.dumps(found))
    done = topo("--diff", TURIN, str(other))
    assert (done.returncode, done.stderr) == (1, "")  # as diff(1) has it
    text = done.stdout
    assert "port at.0000:e3:00.0 port 1.name: mlx5_5 -> mlx5_4\n" in text
    assert "port at.0000:03:00.0 port 1.state: down -> active\n" in text
    assert "GPU at.0000:e6:00.0: {'model': 'NVIDIA H200', 'NUMA node': 7} -> nothing\n" in text
    assert text.count("\n") == 4


def test_a_file_may_come_from_stdin() -> None:
    machine = json.loads(said("--from", str(TOPOLOGIES / "aws-p4de-24xl-topo.xml"), "--json"))
    assert [w["gpu"]["numa_node"] for w in machine["workers"]] == [0] * 4 + [1] * 4
    text = Path(TURIN).read_text()
    done = topo("--from", "-", "--json", stdin=text)
    assert json.loads(done.stdout) == json.loads(said("--from", TURIN, "--json"))
    assert "from stdin" in topo("--from", "-", stdin=text).stdout
    assert topo("--diff", "-", TURIN, stdin=text).stdout == ""


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ('<topology version="2.0">\n <object type="Machine"\n  os_index="x"/></topology>', None),
        (
            '<topology>\n<object type="Machine" cpuset="0x1">\n <object type="NUMANode" cpuset="0x1" os_index="first"/>'
            "</object></topology>",
            "line 3: <object NUMANode> has os_index='first'; expected a whole number",
        ),
        (
            '<system>\n<cpu affinity="f">\n<pci busid="0:1:0.0"><nic>\n<net name="a" speed="fast"/></nic></pci></cpu>'
            "</system>",
            "line 4: <net a> has speed='fast'; expected a whole number",
        ),
        (
            '<topology>\n<object type="Machine"><object type="NUMANode" os_index="0"/></object></topology>',
            "has no core, no PU and no NUMA node with PUs, so it describes no node; expected: the output of lstopo",
        ),
    ],
)
def test_wrong_file_is_an_error_with_line_and_expectation(text: str, answer: str | None, tmp_path: Path) -> None:
    path = tmp_path / "wrong.xml"
    path.write_text(text)
    error = refused("--from", str(path), code=1)
    assert f"{path}: " in error
    assert (answer or "describes no node") in error


def test_an_export_of_this_machine_is_planned_as_it_is_here(tmp_path: Path) -> None:
    path = tmp_path / "here.xml"
    path.write_text(lstopo("--disallowed", "--of", "xml"))
    words = ("--gpus", "sim:2x1MiB", "--cpuset", str(CpuSet(os.sched_getaffinity(0))), "--json")
    here, there = (json.loads(said(*words, *more))["workers"] for more in ((), ("--from", str(path))))
    for worker in (*here, *there):
        del worker["reasons"]  # what limits the memory is known only here
    assert there == here


def test_a_comparison_needs_two(tmp_path: Path) -> None:
    (wrong := tmp_path / "wrong.json").write_text("{}")
    assert f"{wrong} lacks the key 'machine'; expected" in refused("--diff", TURIN, str(wrong))
