"""No option is taken and forgotten: each way to a cluster uses what is typed there, or says what takes it."""

from __future__ import annotations

import re
from typing import Any

import pytest

from hpcgpu.cli import commands
from hpcgpu.cli.commands import worker as worker_command
from hpcgpu.config.layers import (
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
    read_settings,
    unused,
)
from hpcgpu.config.migration import DASK_CUDA, DASK_WORKER
from hpcgpu.errors import ConfigError
from hpcgpu.model.settings import options, user_name

NAMES = {user_name(f) for f in options()}
# A value of each kind that asks for something.
OF_KIND: dict[str, Any] = {
    **dict.fromkeys(("count", "number", "port"), 3),
    **{
        "bytes": "8GiB",
        "duration": "2h",
        "seconds": "7s",
        "text": "x",
        "simulate": "2",
        "texts": ["-x"],
        "lines": ["x"],
    },
}
# What the code asks of the settings of a run in an allocation: plan, agent and deploy of a rank. An option that is new
# is in one of these, or this test fails: say where it is used.
OF_A_RUN = {
    *("gpus_per_node", "gpus", "simulate", "cpu_workers", "nthreads", "python", "site", "workers_per_gpu", "cores"),
    *("reserved_cores", "memory_policy", "nics", "respect_launcher", "device_memory_limit", "memory_limit"),
    *("jit_unspill", "local_directory", "trust_local_directory", "protocol", "security", "interface", "rendezvous"),
    "node_copies",
    *("scheduler_port", "death_timeout", "dashboard", "progress", "resources", "allocator", "env"),
    *("enable_cudf_spill", "cudf_spill_stats"),
    *(name for name in NAMES if name.startswith("rmm_")),
}


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


@pytest.mark.parametrize("name", ["run", "launch", "plan"])
def test_a_commands_help_shows_what_it_takes(name: str) -> None:
    command = commands.hpcgpu.commands[name]
    ours = {p.name: p for p in command.params if p.name in NAMES}
    assert ours.keys() == NAMES  # also those that are refused: with what takes them, not "no such option"
    shown = {n for n, p in ours.items() if not getattr(p, "hidden", False)}
    assert shown == NAMES - set(unused(f"hpcgpu {name}"))


def test_every_option_of_dask_worker_is_taken_or_answered() -> None:
    from distributed.cli.dask_worker import main

    theirs = {p.name: p for p in main.params}
    ours = {o for p in worker_command.params for o in (*p.opts, *p.secondary_opts)}
    missing = [n for n, p in theirs.items() if not set(p.opts) & ours and n not in {**DASK_WORKER, **DASK_CUDA}]
    assert missing == ["version"]
    for name in DASK_WORKER:
        assert name in theirs
