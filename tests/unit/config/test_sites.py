"""Site files: the machines that travel with the package, wrong files, and what a live machine says beside one."""

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import site_schema as schema
import yaml
from golden import check_golden
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from paths import DATA, ROOT

from hpcgpu import batch
from hpcgpu.batch import get
from hpcgpu.config.layers import read_settings
from hpcgpu.config.sites.contradictions import contradictions
from hpcgpu.config.sites.live import apply_live_facts
from hpcgpu.config.sites.node_topology import topology_of
from hpcgpu.config.sites.read import read_site
from hpcgpu.config.sites.recognition import is_here, looks_like
from hpcgpu.config.sites.rules import check_submission, forbidden, notes
from hpcgpu.deploy import site_files
from hpcgpu.deploy.jobs.planned_job import read_job
from hpcgpu.errors import ConfigError
from hpcgpu.host import log
from hpcgpu.model import Result, Settings, Site
from hpcgpu.model.site import Inventory, Match, NodeType
from hpcgpu.plan.jobs.request import plan_request

OURS = sorted(path.stem for path in (ROOT / "site_configs").glob("*.yaml"))
LEAST = "version: 2\nname: x\nbatch: slurm\n"
ARGV = ("hpcgpu", "launch", "--document", "DOCUMENT")
SIZES = (st.integers(1, 120), st.integers(1, 8), st.integers(1, 200))
FILE = """version: 2
name: mine
batch: slurm
sources: {A: {title: the guide, date: 2026-08}}
dialect:
  gpus: gres
account: {env: [PROJECT]}
rules:
  - {require: walltime, source: A}
  - {forbid: --nodelist}
queues:
  - name: gpu
    nodes: [1, 2]
    walltime: 1h
    directives: [--qos=gpu]
  - {name: long, walltime: 1d}
nodes:
  a100:
    gpus: 4
    cpus: 64
    job_memory: 400 GiB
scratch:
  path: /scratch
modules: {load: [cuda]}
defaults:
  queue: gpu
  job_script_prologue: [date]
  job_extra_directives: [--exclusive]
"""
# Faults below the three lines that each file has.
ADDED = (
    ("queues:\n\t- name: a", "line 5: not YAML: found character that cannot start any token"),
    ("queues:\n\t- name: a", "; it begins with a tab, and YAML takes blanks only"),
    ("---\nname: y", "line 4: not YAML: but found another document"),
    ("notes: &a [*a]", "line 4: an alias (*) stands inside of what it names (&); write it out"),
    ("default: {}", "line 4: default: no such key; did you mean 'defaults'?"),
    ("dialect: {gpu: none}", "line 4: dialect.gpu: no such key; did you mean 'gpus'?"),
    ("dialect:\n  gpus: gre", "line 5: dialect.gpus: 'gre' is given; did you mean 'gres'?"),
    ("dialect: {memory: true}", "line 4: dialect.memory: true (so YAML reads yes and on, too) is given; allowed: "),
    ("dialect: {mpiprocs: true}", "line 4: dialect.mpiprocs: no such key; allowed: "),
    ("dialect: {array_limit: 0}", "line 4: dialect: array_limit: 0 is no count; allowed: 1 or more"),
    ("launcher: {command: mpiexec}", "line 4: launcher.command: 'mpiexec' is given; expected `array`, got `str`"),
    ("queues:\n- name: a\n- {name: b, wall: 3h}", "line 6: queues[1].wall: no such key; did you mean 'walltime'?"),
    ("queues:\n- name: a\n  walltime: soon", "line 5: queues[0]: walltime: 'soon' is no time"),
    ("queues:\n- {name: a, nodes: [3, 2]}", "line 5: queues[0]: nodes: [3, 2] are no limits"),
    ("queues:\n- {name: a, nodes: 3}", "line 5: queues[0].nodes: 3 is given; expected `array | null`"),
    ("nodes:\n  a:\n    gpu: x", "line 5: nodes.a: gpus is missing, which must be given"),
    ("nodes: {a: {gpus: 0}}", "gpus: 0 is no count"),
    ("nodes: {a: {gpus: 2, gpu_numa: [0]}}", "NUMA nodes of 1 GPUs, but gpus is 2"),
    ("nodes: {a: {gpus: 1, gpu_numa: [1], numa_cores: [4]}}", "numa_cores has the NUMA nodes 0 to 0 only"),
    ("nodes: {a: {gpus: 1, cores: 5, numa_cores: [4]}}", "they are 4 cores, but cores is 5"),
    ("nodes: {a: {gpus: 1, memory: much}}", "'much' is not a size"),
    ("sources: {A: {title: a, date: today}}", "'today' is no date"),
    ("rules: [{why: x}]", "a rule has either require or forbid"),
    ("match: {host: '['}", "no regular expression"),
    ("nodes:\n  b: {gpus: 1}\n  a: 4", "line 6: nodes.a: 4 is given; expected `object`, got `int`"),
    ("queues:", "line 4: queues: None is given; expected `array`, got `null`"),
    ("queues:\n- name: a\n  walltime: 24", "walltime: 24 has no unit; allowed: 'HH:MM:SS', "),
    ("queues:\n- name: a\n  walltime: 24:00:00", "walltime: 86400 has no unit; allowed: 'HH:MM:SS', "),
    ("queues:\n- name: a\n  walltime_by_nodes: {4: 90}", "walltime_by_nodes: 90 has no unit; allowed: "),
    ("queues:\n- name: a\n  walltime_by_nodes: {few: 3h}", "line 6: queues[0].walltime_by_nodes: {'few': '3h'} is giv"),
    ("nodes: {a: {gpus: 1, memory: 1 GB, job_memory: 2 GB}}", "job_memory: '2 GB' is more than the node has"),
    ("1: 2", "line 1: {'version': 2, 'name': 'x', 'batch': 'slurm', 1: 2} is given; expected `str`"),
)
LIVE = """version: 2
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


@pytest.fixture(autouse=True)
def no_files_of_this_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


def load(name: str) -> Site:
    return read_site(*site_files.find_site(name))


@cache
def site_of(name: str) -> Site:
    return read_site((ROOT / "site_configs" / f"{name}.yaml").read_text(), name)


def asked(site: Site, given: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> Settings:
    """The settings of a job at a site, with what its users must say."""
    needed = {"account": "proj", "walltime": "00:15:00"}
    return read_settings({**needed, **given}, site=site, environ=environ or {}, asks=True)


def head(text: str) -> str:
    """Return a script without what starts the command and waits for it, which tests/data/batch/golden has."""
    first, found, rest = text.partition("\n{\n")
    assert found
    assert rest.count("exec hpcgpu launch --document DOCUMENT") == 1
    return f"{first}\n"


def script(site: Site, settings: Settings, *, member: bool = False) -> str:
    check_submission(settings, site, member=member)
    spec = plan_request(settings, ARGV)
    spec = replace(spec, nodes=1) if member else spec
    return get(site.batch, **site.spoken, forbidden=forbidden(settings, site)).script(spec)


# --- the machines


@pytest.mark.parametrize("name", OURS)
def test_a_site_is_named_as_its_file_and_each_fact_has_a_source(name: str) -> None:
    site = load(name)
    assert site.name == name
    assert site.title
    assert [path for path, _, tags in site.blocks() if not tags] == []
    used = {tag for _, _, tags in site.blocks() for tag in ([tags] if isinstance(tags, str) else tags)}
    assert set(site.sources) == used, "sources that nothing is cited from"
    assert all(source.date >= "2024" for source in site.sources.values())
    assert list(contradictions(site)) == []


@pytest.mark.parametrize("name", OURS)
def test_a_number_of_gpus_is_enough_for_a_gang_of_two_nodes(name: str) -> None:
    site = load(name)
    node = site.node()
    assert node, "the default queue has no known nodes"
    settings = asked(site, {"gpus": 2 * node.gpus})
    assert (settings.nodes, settings.gpus_per_node) == (2, node.gpus)
    check_golden(DATA / "sites" / name / "gang.sh", head(script(site, settings)))


@pytest.mark.parametrize("name", OURS)
def test_a_job_that_joins_an_elastic_cluster(name: str) -> None:
    site = load(name)
    text = script(site, asked(site, {"shape": "elastic"}), member=True)
    check_golden(DATA / "sites" / name / "elastic.sh", head(text))
    given = {"site": name, "account": "a", "walltime": "00:15:00", "gpus": 1}
    _, spec, system = read_job(given, "keyword {name}", (), None)
    printed = system.script(spec)  # as the command prints it
    assert all(directive in printed for directive in site.defaults.get("job_extra_directives", ()))


def test_what_follows_from_the_gpus_says_where_it_comes_from() -> None:
    settings = asked(load("leonardo"), {"gpus": 2})
    assert (settings.nodes, settings.gpus_per_node, settings.cores_per_gpu) == (1, 2, 8)
    assert settings.memory_bytes == 494 * 10**9 // 2
    assert settings.queue == "boost_usr_prod"
    file = "site leonardo, site_configs/leonardo.yaml:"
    assert re.fullmatch(rf"keyword gpus; 4 on a node: {file}\d+", settings.where("nodes"))
    for name in ("memory", "cores_per_gpu"):
        assert re.fullmatch(rf"{file}\d+: in proportion to 4 GPUs of a node", settings.where(name))
    own = asked(load("leonardo"), {"gpus": 2, "memory": "10GB", "cores_per_gpu": 1})
    assert (own.memory_bytes, own.cores_per_gpu) == (10**10, 1)
    # a run inside a job asks for nothing
    assert read_settings({"gpus": 2}, site=load("leonardo")).memory_bytes is None


def test_part_of_a_shared_node_is_proportional_to_the_site_file() -> None:
    settings = asked(load("delta"), {"gpus": 1})
    assert (settings.cores_per_gpu, settings.memory_bytes) == (16, 256 * 10**9 * 7 // 8 // 4)
    assert re.fullmatch(
        r"site delta, site_configs/delta\.yaml:\d+: in proportion to 4 GPUs of a node, without the eighth that the "
        "system may keep",
        settings.where("memory"),
    )
    cores_only = "queues: [{name: a, shared: SHARED}]\nnodes: {b: {gpus: 4, cores: 32, memory: 64 GB}}"
    for shared, cores in (("true", 8), ("false", None)):  # a whole node comes with all of it
        site = read_site(f"{LEAST}{cores_only.replace('SHARED', shared)}\ndefaults: {{queue: a}}", "x.yaml")
        found = asked(site, {"gpus": 2})
        assert (found.cores_per_gpu, found.memory_bytes) == (cores, None)  # nobody says that memory may be asked for
    # and where a document says what jobs may have, it counts
    assert asked(load("snellius"), {"gpus": 1}).memory_bytes == 120 << 30


@pytest.mark.parametrize(
    ("given", "shape"),
    [
        *(({"gpus": "8"}, (2, 4)), ({"gpus": 3}, (1, 3)), ({"gpus": 4, "nodes": 2}, (2, 2))),
        *(({"gpus": 6, "gpus_per_node": 3}, (2, 3)), ({"gpus": 16, "queue": "gpuA100x8"}, (2, 8))),
        ({"gpus": 7}, r"gpus=7 \(set by keyword gpus\): nodes of delta have 4; allowed: 1 to 4"),
        ({"gpus": 9, "nodes": 2}, "gpus=9 .* on nodes=2: "),
        ({"gpus": 8, "gpus_per_node": 3}, "nodes have 3"),
        ({"gpus": 20, "nodes": 2}, "nodes of delta have 4"),
    ],
)
def test_gpus_become_nodes_or_are_refused(given: dict[str, Any], shape: tuple[int, int] | str) -> None:
    if isinstance(shape, str):
        with pytest.raises(ConfigError, match=shape):
            asked(load("delta"), given)
        return
    settings = asked(load("delta"), given)
    assert (settings.nodes, settings.gpus_per_node, settings.gpus) == (*shape, None)


@pytest.mark.parametrize(
    ("name", "given", "queue"),
    [
        ("polaris", {"gpus": 8}, "debug"),
        ("polaris", {"gpus": 12}, "debug-scaling"),
        ("polaris", {"gpus": 48}, "prod"),
        ("polaris", {"gpus": 8, "walltime": "4h"}, "capacity"),  # no job of preemptable is asked for unless it is named
        ("polaris", {"gpus": 12, "shape": "elastic"}, "debug"),  # none does, and this one says why
        ("polaris", {"gpus": 48, "queue": "debug"}, "debug"),
        ("roihu", {"gpus": 2}, "gpumedium"),
        ("roihu", {"gpus": 8}, "gpularge"),
        ("vista", {"gpus": 100}, "gh"),
    ],
)
def test_the_queue_follows_the_size(name: str, given: dict[str, Any], queue: str) -> None:
    settings = asked(load(name), given)
    assert settings.queue == queue
    if "queue" not in given:
        assert settings.where("queue").startswith(f"site {name}")


@given(st.sampled_from(OURS), st.integers(1, 600), st.none() | st.integers(1, 40))
def test_gpus_are_divided_among_nodes_or_refused(name: str, total: int, nodes: int | None) -> None:
    site = site_of(name)
    most = site.node().gpus  # type: ignore[union-attr]
    fits = total % (nodes or -(-total // most)) == 0 and total // (nodes or -(-total // most)) <= most
    try:
        settings = asked(site, {"gpus": total, "nodes": nodes})
    except ConfigError:
        assert not fits
        return
    assert fits
    assert settings.nodes * (settings.gpus_per_node or 0) == total
    assert (settings.gpus_per_node or 0) <= most
    assert settings.nodes == nodes or nodes is None


@given(st.sampled_from(OURS), *SIZES, st.sampled_from(["gang", "elastic"]))
def test_a_queue_that_was_chosen_takes_the_job_or_no_other_would(
    name: str, nodes: int, each: int, hours: int, shape: str
) -> None:
    site = site_of(name)
    default = site.node()
    wanted = {"nodes": nodes, "gpus_per_node": min(each, default.gpus if default else 1)}
    wanted |= {"walltime": f"{hours}h", "shape": shape}

    def is_taken(**more: object) -> bool:
        try:
            check_submission(asked(site, {**wanted, **more, "job_extra_directives": ["-l storage=x"]}), site)
        except ConfigError as error:
            assert "would refuse this job" in str(error)
            return False
        return True

    if not is_taken():
        alike = [q for q in site.queues if site.node(q.name) == default and q.preemption is None]
        assert not any(is_taken(queue=queue.name) for queue in alike)


def test_an_account_of_the_environment() -> None:
    settings = read_settings({}, site=load("casper"), environ={"PBS_ACCOUNT": "x"}, asks=True)
    assert settings.account == "x"
    assert settings.where("account") == f"PBS_ACCOUNT, as {load('casper').place('account')} has it"
    assert asked(load("casper"), {"account": "own"}, {"PBS_ACCOUNT": "x"}).account == "own"
    assert asked(load("daint"), {}).local_directory is None  # its scratch is in memory
    assert asked(load("polaris"), {}).local_directory == "/local/scratch"


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("queue", ["queue: gpu"]),
        ("gpus_per_node", ["gpus: 4"]),
        ("cores_per_gpu", ["cpus: 64"]),
        ("memory", ["job_memory"]),
        ("local_directory", ["path: /scratch"]),
        ("job_script_prologue", ["modules", "job_script_prologue"]),
        ("job_extra_directives", ["--exclusive", "--qos=gpu"]),
        ("account", ["PROJECT"]),
    ],
)
def test_each_value_of_a_file_says_its_line(setting: str, words: list[str]) -> None:
    settings = read_settings({}, site=read_site(FILE, "m.yaml"), environ={"PROJECT": "p"}, asks=True)
    numbers = [str(i) for text in words for i, line in enumerate(FILE.splitlines(), 1) if text in line]
    assert re.findall(r"m\.yaml:(\d+)", settings.where(setting)) == numbers
    assert "site mine, m.yaml:" in settings.where(setting)


@pytest.mark.parametrize(
    ("given", "cited"),
    [
        ({}, "the guide, 2026-08; m.yaml:9"),
        ({"queue": "gpu", "walltime": "1h", "nodes": 3}, "m.yaml:13"),
        ({"queue": "gpu", "walltime": "2h"}, "m.yaml:14"),
        ({"walltime": "1d", "gpus_per_node": 5}, "m.yaml:19"),
        ({"walltime": "1h", "job_extra_directives": ["-w n1"]}, "m.yaml:10"),
    ],
)
def test_a_refusal_says_the_line_of_its_rule(given: dict[str, Any], cited: str) -> None:
    site = read_site(FILE, "m.yaml")
    with pytest.raises(ConfigError, match=re.escape(f"{cited})") + "|" + re.escape(f": {cited}. Leave it out")):
        script(site, read_settings(given, site=site, asks=True))


# --- what a site refuses


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("polaris", {"queue": "debug", "nodes": 3}, r"nodes=3, but queue debug takes 1 to 2 nodes \(ALCF user guide"),
        ("polaris", {"queue": "prod", "nodes": 12, "walltime": "4h"}, "jobs of 12 nodes in queue prod have 03:00:00"),
        ("polaris", {"queue": "prod", "nodes": 9}, "queue prod takes 10 to 496 nodes"),
        ("polaris", {"queue": "prod", "nodes": 10, "shape": "elastic"}, "have one node, but queue prod takes 10"),
        ("polaris", {"queue": "debug-scaling", "shape": "elastic"}, "one job of each user at a time"),
        ("roihu", {"gpus": 1, "queue": "gpularge"}, r"1 GPUs, but .* gpularge takes 4 to 40.*\(gpumedium, gputest\)"),
        ("roihu", {"gpus": 44}, r"nodes=11, but queue gpumedium takes 1 to 4 nodes"),
        ("vista", {"walltime": "50h"}, r"walltime='50:00:00', but jobs in queue gh have 48:00:00 at most \(TACC docs"),
        ("sophia", {"queue": "by-gpu", "nodes": 2}, "queue by-gpu takes 1 nodes"),
    ],
)
def test_a_limit_is_said_with_its_source_and_how_to_go_on(name: str, given: dict[str, Any], said: str) -> None:
    site = load(name)
    with pytest.raises(ConfigError, match=f"site {name} would refuse this job: .*{said}.*site_limits=False") as refused:
        check_submission(asked(site, given), site)
    assert "2026-08" in str(refused.value)
    check_submission(asked(site, {**given, "site_limits": False}), site)


def test_a_forbidden_option_is_refused_from_whomever_it_is() -> None:
    site = load("vista")
    said = r"'--mem=1G' is in the job's script, but site vista refuses --mem \(whole nodes .*2026-08.*site_limits=False"
    with pytest.raises(ConfigError, match=said):
        script(site, asked(site, {"job_extra_directives": ["--mem=1G"]}))
    with pytest.raises(ConfigError, match="site vista refuses --nodelist"):
        script(site, asked(site, {"job_extra_directives": ["-w node1"]}))
    assert "--mem=1G" in script(site, asked(site, {"job_extra_directives": ["--mem=1G"], "site_limits": False}))


def test_what_a_job_must_say() -> None:
    site = load("polaris")
    with pytest.raises(ConfigError, match=r"without account and walltime: give account=.*\(ALCF user guide"):
        check_submission(read_settings({}, site=site, asks=True), site)
    own = read_site(LEAST + "rules: [{require: -l filesystems, why: because}]", "x.yaml")
    with pytest.raises(ConfigError, match=r"without -l filesystems \(because\): give it in job_extra_directives"):
        check_submission(read_settings({}, site=own), own)
    check_submission(read_settings({"job_extra_directives": ["-l filesystems=home"]}, site=own), own)
    with pytest.raises(ConfigError, match=r"UCX has no transport for this site's network \(NERSC docs, Dask, 2026-11"):
        asked(load("perlmutter"), {"protocol": "ucx"})


def test_a_scheduler_on_a_login_node_is_told_the_sites_policy() -> None:
    site = load("derecho")
    [said] = notes(asked(site, {"shape": "elastic", "scheduler": "here"}), site)
    assert "scheduler='here' (set by keyword scheduler): on a login node of derecho, heavy processes are ended" in said
    assert "use policies, 2026-05" in said
    assert notes(asked(site, {"shape": "elastic"}), site) == ()
    assert notes(asked(load("delta"), {"shape": "elastic", "scheduler": "here"}), load("delta")) == ()
    assert notes(Settings(scheduler="here"), None) == ()


# --- where files are


def test_the_users_own_folder_comes_first(tmp_path: Path) -> None:
    own = tmp_path / "hpcgpu" / "sites"
    own.mkdir(parents=True)
    (own / "vista.yaml").write_text("version: 2\nname: mine\nbatch: slurm\n")
    (own / "lab.yaml").write_text("version: 2\nname: lab\nbatch: slurm\n")
    assert load("vista").name == "mine"
    assert load("lab").name == "lab"
    assert len(OURS) >= 20
    with pytest.raises(ConfigError, match=r"no site 'lap' in .*did you mean 'lab'"):
        site_files.find_site("lap")


def test_a_path(tmp_path: Path) -> None:
    path = tmp_path / "lab.yaml"
    path.write_text(LEAST)
    assert load(str(path)) == Site(name="x", batch="slurm")
    with pytest.raises(ConfigError, match="cannot be read"):
        site_files.find_site(str(tmp_path / "none.yaml"))
    path.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="cannot be read"):
        site_files.find_site(str(path))


def test_path_that_others_can_change_is_said(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its prologue runs as its user. An installation's file is as safe as its code."""
    path = tmp_path / "lab.yaml"
    path.write_text(LEAST)
    path.chmod(0o666)
    load(str(path))
    assert f"site file {path} is not safe: every user of this node can change {path}" in capfd.readouterr().err
    monkeypatch.setattr(log, "_logged", set())
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    load(str(path))
    assert capfd.readouterr().err == ""


# --- what it looks like


@pytest.mark.parametrize(
    ("environ", "host", "found"),
    [
        ({"NERSC_HOST": "perlmutter"}, "login12", ("perlmutter", "NERSC_HOST=perlmutter")),
        ({"SYSTEMNAME": "jupiter"}, "x", ("jupiter", "SYSTEMNAME=jupiter")),
        ({}, "polaris-login-01", ("polaris", "the host is polaris-login-01")),
        ({"NERSC_HOST": "cori"}, "laptop", None),
        ({"NERSC_HOST": "perlmutter"}, "polaris-login-01", None),  # two: neither
    ],
)
def test_what_a_machine_looks_like(environ: dict[str, str], host: str, found: tuple[str, str] | None) -> None:
    texts = {name: path.read_text() for name, path in site_files.site_files().items()}
    assert looks_like(texts, environ, host) == found
    for wrong in ("", "match: [", "match: 3", "match: {host: '['}", "match: {env: 3}\n"):
        assert looks_like({"x": wrong}, {"A": "b"}, "host") is None


def test_topology_of_a_documented_node_has_its_gpus_and_cores() -> None:
    for node in site_of("delta").nodes.values():
        topology = topology_of(node)
        assert tuple(gpu.numa_node for gpu in topology.gpus) == node.gpu_numa
        assert len(topology.cores) == sum(node.numa_cores)
    with pytest.raises(ConfigError, match="NUMA nodes of the GPUs are not documented"):
        topology_of(NodeType(gpus=4))


# --- wrong files


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "line 1: a site file is a mapping with at least version, name and batch"),
        ("- a", "a mapping"),
        ("a: [", "line 1: not YAML: did not find expected node content (while parsing a flow node)"),
        ("version: 2\nname: x\nname: y", "line 3: 'name' is given twice"),
        ("name: x", "line 1: version: None is given; this hpcgpu reads version 2"),
        ("version: 1\nucx: false", "line 1: version: 1 is given; this hpcgpu reads version 2"),
        ("version: 2\nname: x\n", "line 1: batch is missing, which must be given"),
        (LEAST.replace("slurm", "lsf"), "line 3: batch: 'lsf' is given; allowed: pbs, slurm"),
        (LEAST.replace(": x", ": A B"), "line 2: name: 'A B' is no name"),
        (LEAST.replace("slurm", "pbs") + "dialect: {place: 1}", "line 4: dialect.place: 1 is given; expected `str"),
        (LEAST.replace("slurm", "pbs") + 'dialect: {resources: "a\\x01b"}', "line 4: dialect.resources: "),
        (LEAST.replace("slurm", "pbs") + "dialect: {cpus_multiple_of: 0}", "cpus_multiple_of: 0 is no count"),
        *((LEAST + text, said) for text, said in ADDED),
    ],
)
def test_wrong_site_file_is_named_with_line_and_path_of_value(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_site(text, "sites/x.yaml")
    assert str(caught.value).startswith("sites/x.yaml")
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rules: [{require: acount}]", "rules[0].require: 'acount' is no setting; did you mean 'account'?"),
        ("rules: [{forbid: mem}]", "rules[0].forbid: 'mem' is no option"),
        ("defaults:\n  nodes: 0", "x.yaml:5: defaults.nodes: "),
        (
            "defaults:\n  gpus: [4]",
            "is not a number of GPUs: give gpus_per_node: 4; gpus: is the total at a known site, gpus: 8, or",
        ),
        ("defaults:\n  nods: 1", "x.yaml:5: defaults.nods: unknown option 'nods', set by this file: did you m"),
        ("defaults: {site: other}", "'site' is no setting that a site can have"),
        ("rules: [{forbid: --qos}, {require: --qos}]", "rules[1].require: --qos is required here and forbidden by rul"),
        ("rules: [{forbid: --mem}]", "rules[0].forbid: --mem is forbidden, but dialect.memory writes it: write dialec"),
        ("dialect: {gpus: gres}\nrules: [{forbid: --gres}]", "x.yaml:4: dialect.gpus: --gres is forbidden, but "),
        ("defaults: {job_extra_directives: [--qos=a]}\nrules: [{forbid: --qos}]", "defaults.job_extra_directives: '--"),
        ("notes: [{text: a, source: B}]\nsources: {A: {title: a, date: 2026-01}}", "'B' is not among the sources; all"),
        ("dialect: {source: A}", "dialect.source: 'A' is not among the sources"),
        ("queues: [{name: a}, {name: a}]", "queues[1].name: 'a' is there twice"),
        ("queues: [{name: a, node: b}]\nnodes: {c: {gpus: 1}}", "queues[0].node: 'b' is no type of nodes; allowed: c"),
        ("queues: [{name: gpu}]\ndefaults: {queue: gpus}", "defaults.queue: 'gpus' is not among the queues; did you m"),
        ("queues: [{name: a, walltime: 1h}]\ndefaults: {queue: a, walltime: 2h}", "defaults.walltime: 2h, but queue a"),
        ("queues: [{name: a, walltime: 1h}]\ndefaults: {queue: a, walltime: soon}", "walltime: 'soon' is not a"),
        ("defaults: {walltime: 30}", "x.yaml:4: defaults.walltime: walltime: 30 is not a duration: it has no unit"),
        ("queues: [{name: a, nodes: [1, 2]}]\ndefaults: {queue: a, nodes: 3}", "x.yaml:5: defaults.nodes: 3, but "),
        ("nodes: {a: {gpus: 4}}\ndefaults: {gpus_per_node: 8}", "x.yaml:5: defaults.gpus_per_node: 8, but the nod"),
        ("queues: [{name: a}]\nnodes: {b: {gpus: 1}, c: {gpus: 2}}", "queues[0]: there are 2 types of nodes: say node"),
        ("queues: [{name: a, node: b, nodes: [1, 2], gpus: [9, 9]}]\nnodes: {b: {gpus: 4}}", "queues[0].gpus: 2 nodes"),
    ],
)
def test_rules_that_contradict_each_other(text: str, said: str) -> None:
    found = "; ".join(contradictions(read_site(LEAST + text, "x.yaml")))
    assert found.startswith("x.yaml:")
    assert said in found


# --- the schema


def test_the_schema_and_the_page_of_keys_are_those_of_the_code() -> None:
    check_golden(ROOT / "docs" / "reference" / "site.schema.json", schema.json_schema())
    check_golden(ROOT / "docs" / "reference" / "site-files.md", schema.reference())


@pytest.mark.parametrize("name", OURS)
def test_each_file_fits_the_schema_for_editors(name: str) -> None:
    whole = json.loads(schema.json_schema())
    raw = yaml.load((ROOT / "site_configs" / f"{name}.yaml").read_text(), yaml.BaseLoader)
    text = yaml.safe_load((ROOT / "site_configs" / f"{name}.yaml").read_text())
    for source, said in raw["sources"].items():  # plain YAML makes dates of them
        text["sources"][source]["date"] = said["date"]
    assert Draft202012Validator(whole).is_valid(text)
    of_batch = {"$defs": whole["$defs"], "$ref": f"#/$defs/{text['batch'].capitalize()}Dialect"}
    assert Draft202012Validator(of_batch).is_valid(text["dialect"])
    for wrong in ({"queus": []}, {"notes": "x"}):
        assert not Draft202012Validator(whole).is_valid({**text, **wrong})


def test_the_readme_names_every_block_and_shows_a_site() -> None:
    text = (ROOT / "site_configs" / "README.md").read_text()
    assert not [key for key in json.loads(schema.json_schema())["properties"] if f"`{key}`" not in text]
    example = text.partition("```yaml\n")[2].partition("```")[0]
    assert read_site(example, "README").name == "mymachine"


# --- beside what Slurm and PBS say: the machine counts, and is cited


def live(sinfo: str, file: str = LIVE) -> Site:
    found = batch.read("slurm", [Result(("sinfo",), 0, sinfo, ""), *[Result(("scontrol",), 0, "", "")] * 2])
    return apply_live_facts(read_site(file, "m.yaml"), found)


def changed(site: Site) -> dict[str, Any]:
    """Return the values that are the machine's, by their keys."""
    origins = [path for path, place in site.origins.items() if ", not " in place]
    return {
        str(key): getattr(site.queues[which] if block == "queues" else site.nodes[which], key)
        for block, which, key in origins
    }


def asked_live(site: Site, **given: Any) -> Settings:
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
    check_submission(asked_live(now, walltime="30h"), now)
    site = read_site(LIVE, "m.yaml")
    with pytest.raises(ConfigError, match="24:00:00 at most"):
        check_submission(asked_live(site, walltime="30h"), site)
    now = live(AS_WRITTEN.replace("1-00", "0-12"))
    with pytest.raises(ConfigError, match=r"have 12:00:00 at most \(the guide, 2026-08; sinfo, not m.yaml:6\)"):
        check_submission(asked_live(now, walltime="13h"), now)


def test_settings_follow_from_the_nodes_that_exist() -> None:
    now = live(AS_WRITTEN.replace(":4", ":8").replace("64", "32").replace("512000", "409600"))
    found = asked_live(now, gpus=16)
    assert (found.nodes, found.gpus_per_node, found.cores_per_gpu, found.memory_bytes) == (2, 8, 4, 400 << 30)
    assert found.where("nodes") == "keyword gpus; 8 on a node: site mine, sinfo, not m.yaml:9"


def test_limits_by_size_are_cut_at_the_queues_own() -> None:
    file = LIVE.replace("walltime: 24h", "walltime_by_nodes: {1: 6h, 4: 24h}")
    now = live(AS_WRITTEN.replace("1-00", "0-12"), file)
    assert [now.queues[0].walltime_s(nodes) for nodes in (1, 4)] == [6 * 3600, 12 * 3600]
    assert changed(live(AS_WRITTEN.replace("1-00", "2-00"), file)) == {}


def test_a_qos_is_no_queue_of_sinfo() -> None:
    assert changed(live(AS_WRITTEN.replace("1-00", "0-12"), LIVE + "dialect: {queue: qos}\n")) == {}


def test_pbs_values_replace_those_of_its_queues_and_nodes() -> None:
    site = read_site(LIVE.replace("slurm", "pbs"), "m.yaml")
    nodes = '{"nodes": {"n1": {"resources_available": {"ncpus": 48, "ngpus": 4, "mem": "800gb"}}}}'
    queues = '{"Queue": {"gpu": {"enabled": "True", "resources_max": {"walltime": "12:00:00"}}}}'
    found = batch.read("pbs", [Result(("x",), 0, text, "") for text in (nodes, queues, "")])
    now = apply_live_facts(site, found)
    assert changed(now) == {"walltime": "12:00:00", "cpus": 48}
    assert now.at("queues", 0, "walltime") == "qstat -Q, not m.yaml:6"
    assert now.at("nodes", "a100", "cpus") == "pbsnodes, not m.yaml:9"


def test_without_an_answer_or_elsewhere_nothing_is_compared() -> None:
    site = read_site(LIVE, "m.yaml")
    assert apply_live_facts(site, Inventory(batch="slurm")) == site
    assert is_here(Match(), {}, "any")
    assert is_here(Match(host="login[0-9]+"), {}, "login3")
    assert is_here(Match(env={"A": "b"}, host="x"), {"A": "b"}, "other")
    assert not is_here(Match(env={"A": "b"}, host="login[0-9]+"), {"A": "c"}, "laptop")
