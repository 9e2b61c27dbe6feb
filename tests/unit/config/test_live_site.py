"""A site's file beside what Slurm and PBS say: the machine counts, and is cited."""

from __future__ import annotations

from typing import Any

import pytest

from hpcgpu import batch
from hpcgpu.config.layers import read_settings
from hpcgpu.config.sites import apply_live_facts, check_submission, is_here
from hpcgpu.config.sites.read import read_site
from hpcgpu.errors import ConfigError
from hpcgpu.model import Result, Settings, Site
from hpcgpu.model.site import Inventory, Match

FILE = """version: 2
name: mine
batch: slurm
sources: {A: {title: the guide, date: 2026-08}}
queues:
  - {name: gpu, node: a100, nodes: [1, 8], walltime: 24h, source: A}
  - {name: other, node: a100, walltime: 1h}
nodes:
  a100: {gpus: 4, cpus: 64, job_memory: 500 GiB, cores: 64, numa_cores: [32, 32], gpu_numa: [0, 0, 1, 1], source: A}
defaults: {queue: gpu}
"""
AS_WRITTEN = "gpu|gpu*|9|1-00:00:00|1-8|64|512000|gpu:a100:4"


def live(sinfo: str, file: str = FILE) -> Site:
    found = batch.read("slurm", [Result(("sinfo",), 0, sinfo, ""), *[Result(("scontrol",), 0, "", "")] * 2])
    return apply_live_facts(read_site(file, "m.yaml"), found)


def changed(site: Site) -> dict[str, Any]:
    """Return the values that are the machine's, by their keys."""
    origins = [path for path, place in site.origins.items() if ", not " in place]
    return {
        str(key): getattr(site.queues[which] if block == "queues" else site.nodes[which], key)
        for block, which, key in origins
    }


def asked(site: Site, **given: Any) -> Settings:
    return read_settings({"walltime": "15m", **given}, site=site, asks=True)


@pytest.mark.parametrize(
    ("sinfo", "values"),
    [
        (AS_WRITTEN, {}),
        ("", {}),
        (AS_WRITTEN.replace("64", "128").replace("512000", "900000"), {}),  # less than there is may be a rule
        (AS_WRITTEN.replace("gpu*", "gpu").replace("gpu|", "gpus|"), {}),  # a queue that nobody lists
        (AS_WRITTEN.replace("1-00", "0-12"), {"walltime": "12:00:00"}),
        (AS_WRITTEN.replace("1-8", "1-2"), {"nodes": (1, 2)}),
        (AS_WRITTEN.replace(":4", ":8"), {"gpus": 8}),
        (AS_WRITTEN.replace("64", "32"), {"cpus": 32}),
        (AS_WRITTEN.replace("512000", "409600"), {"job_memory": "409600 MiB"}),
        (AS_WRITTEN.replace("1-00", "2-00").replace("1-8", "1-9"), {"walltime": "48:00:00", "nodes": (1, 9)}),
    ],
)
def test_values_that_differ_are_the_machines(sinfo: str, values: dict[str, Any]) -> None:
    assert changed(live(sinfo)) == values


def test_live_limits_count_above_and_below_those_of_the_file() -> None:
    now = live(AS_WRITTEN.replace("1-00", "2-00"))
    check_submission(asked(now, walltime="30h"), now)
    site = read_site(FILE, "m.yaml")
    with pytest.raises(ConfigError, match="24:00:00 at most"):
        check_submission(asked(site, walltime="30h"), site)
    now = live(AS_WRITTEN.replace("1-00", "0-12"))
    with pytest.raises(ConfigError, match=r"have 12:00:00 at most \(the guide, 2026-08; sinfo, not m.yaml:6\)"):
        check_submission(asked(now, walltime="13h"), now)


def test_settings_follow_from_the_nodes_that_exist() -> None:
    now = live(AS_WRITTEN.replace(":4", ":8").replace("64", "32").replace("512000", "409600"))
    found = asked(now, gpus=16)
    assert (found.nodes, found.gpus_per_node, found.cores_per_gpu, found.memory_bytes) == (2, 8, 4, 400 << 30)
    assert found.where("nodes") == "keyword gpus; 8 on a node: site mine, sinfo, not m.yaml:9"


def test_limits_by_size_are_cut_at_the_queues_own() -> None:
    file = FILE.replace("walltime: 24h", "walltime_by_nodes: {1: 6h, 4: 24h}")
    now = live(AS_WRITTEN.replace("1-00", "0-12"), file)
    assert [now.queues[0].walltime_s(nodes) for nodes in (1, 4)] == [6 * 3600, 12 * 3600]
    assert changed(live(AS_WRITTEN.replace("1-00", "2-00"), file)) == {}


def test_a_qos_is_no_queue_of_sinfo() -> None:
    assert changed(live(AS_WRITTEN.replace("1-00", "0-12"), FILE + "dialect: {queue: qos}\n")) == {}


def test_pbs_values_replace_those_of_its_queues_and_nodes() -> None:
    site = read_site(FILE.replace("slurm", "pbs"), "m.yaml")
    nodes = '{"nodes": {"n1": {"resources_available": {"ncpus": 48, "ngpus": 4, "mem": "800gb"}}}}'
    queues = '{"Queue": {"gpu": {"enabled": "True", "resources_max": {"walltime": "12:00:00"}}}}'
    found = batch.read("pbs", [Result(("x",), 0, text, "") for text in (nodes, queues, "")])
    now = apply_live_facts(site, found)
    assert changed(now) == {"walltime": "12:00:00", "cpus": 48}
    assert now.at("queues", 0, "walltime") == "qstat -Q, not m.yaml:6"
    assert now.at("nodes", "a100", "cpus") == "pbsnodes, not m.yaml:9"


def test_without_an_answer_or_elsewhere_nothing_is_compared() -> None:
    site = read_site(FILE, "m.yaml")
    assert apply_live_facts(site, Inventory(batch="slurm")) == site
    assert is_here(Match(), {}, "any")
    assert is_here(Match(host="login[0-9]+"), {}, "login3")
    assert is_here(Match(env={"A": "b"}, host="x"), {"A": "b"}, "other")
    assert not is_here(Match(env={"A": "b"}, host="login[0-9]+"), {"A": "c"}, "laptop")
