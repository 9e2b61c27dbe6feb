"""No option is taken and forgotten, and each is on the page of options and in help()."""

import contextlib
import inspect
import re
from typing import Any

import options_page
import pytest
from golden import check_golden
from paths import ROOT

import hpcgpu
from hpcgpu.cli.commands import plan, run
from hpcgpu.cli.worker import worker as worker_command
from hpcgpu.config.entry_points import (
    CLIENT,
    ENTRY_POINTS,
    JOBSCRIPT,
    LAUNCH,
    LOCAL,
    REQUEST,
    RUN,
    RUNNER,
    START,
    TIME,
    check_entry_point,
    unused,
)
from hpcgpu.config.keywords import documented, parameters, type_of
from hpcgpu.config.layers import read_settings
from hpcgpu.config.migration import DASK_CUDA, DASK_WORKER
from hpcgpu.errors import ConfigError
from hpcgpu.model.settings import options, user_name

NAMES = {user_name(f) for f in options()}
# A value of each kind that asks for something.
OF_KIND: dict[str, Any] = {
    **dict.fromkeys(("count", "number", "port", "amount"), 3),
    **{"bytes": "8GiB", "duration": "2h", "seconds": "7s", "text": "x", "simulate": "2", "texts": ["-"]},
    "lines": ["x"],
}
# What the code asks of the settings of a run in an allocation: plan, agent and deploy of a rank. An option that is new
# is in one of these, or this test fails: say where it is used.
OF_A_RUN = {
    *("gpus_per_node", "gpus", "simulate", "cpu_workers", "nthreads", "python", "site", "workers_per_gpu", "cores"),
    *("reserved_cores", "memory_policy", "nics", "respect_launcher", "device_memory_limit", "memory_limit"),
    *("jit_unspill", "local_directory", "trust_local_directory", "protocol", "security", "interface", "rendezvous"),
    *("node_copies", "scheduler_port", "death_timeout", "dashboard", "resources", "allocator", "env"),
    "carbon_g_per_kwh",
    *("enable_cudf_spill", "cudf_spill_stats"),
    *(name for name in NAMES if name.startswith("rmm_")),
}
PAGE = ROOT / "docs/reference/options.md"


def value_of(name: str) -> Any:
    (option,) = (f for f in options() if user_name(f) == name)
    if option.metadata["kind"] == "flag":
        return not option.default
    choices = [c for c in option.metadata["choices"] if c != option.default]
    return choices[0] if choices else OF_KIND[option.metadata["kind"]]


def test_each_option_is_used_by_a_run_or_has_its_place() -> None:
    parts = (set(REQUEST), set(TIME), set(CLIENT), set(START), OF_A_RUN)
    assert sorted(name for part in parts for name in part) == sorted(NAMES)
    assert set(unused(RUN)) == NAMES - OF_A_RUN - set(TIME)
    assert set(unused(RUN, in_job=False)) == NAMES - OF_A_RUN
    assert set(unused(LAUNCH)) == set(unused(RUN)) - set(START)
    assert set(unused(JOBSCRIPT, in_job=False)) == set(CLIENT)
    assert unused(RUNNER).keys() == unused(RUN).keys() | {"python"}
    assert unused("SLURMGPUCluster") == {}


@pytest.mark.parametrize(
    ("entry_point", "name"), [(d, n) for d in ENTRY_POINTS for n in sorted(unused(d, in_job=False))]
)
def test_what_would_do_nothing_is_refused_with_what_takes_it(entry_point: str, name: str) -> None:
    value = value_of(name)
    settings = read_settings({name: value}, given_from="option --{flag}")
    with pytest.raises(ConfigError) as refused:
        check_entry_point(entry_point, settings, {name: value}, in_job=False)
    assert str(refused.value).startswith(f"{name}=")
    assert f"(set by option --{name.replace('_', '-')}): " in str(refused.value)
    # it names an entry point that has a use for the option
    named = re.findall(r"'(hpcgpu \w+)'|(SLURMGPUCluster)|(class of a batch system)", str(refused.value))
    assert [d for words in named for d in words if d and name not in unused(d, in_job=False)]


def test_option_without_effect_from_elsewhere_is_no_error() -> None:
    for given, environ in (({"nodes": 1, "shape": "gang"}, {}), ({}, {"HPCGPU_QUEUE": "gpu", "HPCGPU_NODES": "3"})):
        settings = read_settings(given, environ=environ)
        check_entry_point(RUN, settings, given, in_job=False)
    aliased = {"partition": "gpu"}
    with pytest.raises(ConfigError, match=r"^queue='gpu' \(set by keyword partition\): it is asked of a batch"):
        check_entry_point(RUNNER, read_settings(aliased), aliased, in_job=True)
    check_entry_point(LOCAL, read_settings({"name": "mine"}), {"name": "mine"}, in_job=False)
    several = {"partition": "gpu", "nodes": 3, "shape": "elastic"}
    with pytest.raises(ConfigError, match=r"\Aqueue='gpu' .*\nnodes=3 .*\nshape='elastic' .*\Z"):
        check_entry_point(LOCAL, read_settings(several), several, in_job=False)


def test_every_option_of_dask_worker_is_taken_or_answered() -> None:
    from distributed.cli.dask_worker import main

    theirs = {p.name: p for p in main.params}
    ours = {o for p in worker_command.params for o in (*p.opts, *p.secondary_opts)}
    missing = [n for n, p in theirs.items() if not set(p.opts) & ours and n not in {**DASK_WORKER, **DASK_CUDA}]
    assert missing == ["version"]
    for name in DASK_WORKER:
        assert name in theirs


def test_the_page_is_current() -> None:
    check_golden(PAGE, options_page.render())


def test_every_option_is_there_with_all_its_names() -> None:
    text = PAGE.read_text()
    for f in options():
        name = user_name(f)
        assert text.count(f"\n- **`{name}`**") == 1
        assert all(f"`{alias}`" in row(name).split(": ")[0] for alias in f.metadata["aliases"])
        assert len(row(name).partition(": ")[2]) > 15
    assert re.search(r"^\| hpcgpu run, hpcgpu launch, .*, LocalGPUCluster \| `nodes`, `queue`, ", text, re.MULTILINE)
    assert not re.search(r"[.:] (Tls|CuDF|Mpi|Rmm)\b", text)


def test_flags_and_variables_are_as_the_page_says() -> None:
    """The rule for names, in place of a list: hyphens, capitals, and ``--no-`` for what is on or off."""
    flags = {flag for command in (plan, run) for p in command.params for flag in (*p.opts, *p.secondary_opts)}
    for f in options():
        name = user_name(f)
        flag = name.replace("_", "-")
        assert {f"--{flag}", *([f"--no-{flag}"] if f.metadata["kind"] == "flag" else [])} <= flags
        value = {"flag": "true", "port": "1"}.get(f.metadata["kind"], "nonsense of a test")
        with contextlib.suppress(ConfigError):
            assert read_settings({}, environ={f"HPCGPU_{name.upper()}": value}).where(name) == f"HPCGPU_{name.upper()}"


def row(name: str) -> str:
    return next(line for line in PAGE.read_text().splitlines() if line.startswith(f"- **`{name}`**"))


@pytest.mark.parametrize("name", ["SLURMGPUCluster", "PBSGPUCluster", "LocalGPUCluster", "GPURunner"])
def test_signature_shows_every_option_with_its_default(name: str) -> None:
    cls = getattr(hpcgpu, name)
    refused = unused(name)
    taken = [f for f in options() if user_name(f) not in refused]
    shown, doc = inspect.signature(cls).parameters, inspect.getdoc(cls)
    assert [n for n in shown if n in map(user_name, options())] == [user_name(f) for f in taken]
    assert (shown["device_memory_limit"].default, shown["env"].default) == (0.8, {})
    assert ("nodes" in refused) == (name in ENTRY_POINTS)
    for f in taken:
        assert f"\n{user_name(f)} : " in doc
        assert f.metadata["text"] in " ".join(doc.split())
    assert [n for n in refused if f"\n{n} : " in doc] == []
    assert "\nprotocol : {" in doc
    assert "given" not in doc.partition("Raises")[0].partition("Parameters")[2].split()
    sections = ["Parameters\n---", "Raises\n---", "Examples\n---"]
    places = [doc.find(section) for section in sections if section in doc]
    assert len(places) >= 2
    assert places == sorted(places)


def test_the_sections_of_the_base_stand_before_ones_own() -> None:
    base = "Base.\n\nParameters\n----------\n**keywords\n    The options.\nloop : IOLoop\n    Of Dask.\n"
    own = "Mine.\n\nMore.\n\nExamples\n--------\n>>> 1\n1\n"
    doc = documented(own, base)
    assert doc.startswith("Mine.\n\nMore.\n\nParameters\n----------\nnodes : int, default 1\n")
    assert doc.endswith("\nloop : IOLoop\n    Of Dask.\n\nExamples\n--------\n>>> 1\n1\n")
    assert documented("") == "\n"  # python -OO
    doc = inspect.getdoc(hpcgpu.SLURMGPUCluster)
    assert "\nranks : {'auto', 'gpu', 'node'}, default 'auto'\n    one MPI rank per GPU, or one per node; auto: " in doc
    assert "\nqueue : str, optional\n    queue or partition; also partition\n" in doc


def test_each_option_has_a_type_and_each_error_its_name() -> None:
    assert all(type_of(f) for f in options())
    assert len(parameters()) == len(options())
    for name in ("HpcGpuError", "ConfigError", "SubmitError", "JobError", "LaunchError", "SpillError"):
        assert issubclass(getattr(hpcgpu, name), hpcgpu.HpcGpuError)
        assert name in dir(hpcgpu)
