"""Settings from six places: who wins, what is remembered, and what is said about a wrong one."""

import inspect
import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any

import dask_jobqueue
import numpy as np
import pytest
import ranks
import yaml
from distributed import LocalCluster
from distributed.security import Security
from golden import check_golden
from hypothesis import given as draw
from hypothesis import strategies as st
from paths import DATA
from programs import python

from hpcgpu import LocalGPUCluster
from hpcgpu.config import migration
from hpcgpu.config.layers import chosen_site, read_settings
from hpcgpu.config.migration import DASK_CUDA, HINTS, JOBQUEUE, ignored, read_local_cuda, translate, without
from hpcgpu.config.values import KINDS, as_typed, read_value
from hpcgpu.errors import ConfigError, plain, whole
from hpcgpu.model import Settings, Site
from hpcgpu.model.allocation import SimulatedGpus, parse_simulated
from hpcgpu.model.settings import BY_NAME, DEVICE, NO_LIMIT, SHARE, Limit, options, user_name
from hpcgpu.model.site import NodeType

SITE = Site(name="here", batch="slurm", defaults={"queue": "gpu", "nthreads": 2}, nodes={"gpu": NodeType(gpus=4)})
GOOD = [
    ("nodes", "4", 4),
    ("log_directory", PurePosixPath("/a b"), "/a b"),
    ("memory", "5GB", 5 * 10**9),
    ("memory", 5e9, 5 * 10**9),
    ("walltime", "02:00:00", 7200),
    ("walltime", "90s", 90),
    *(("device_memory_limit", value, value) for value in (0, 0.3, 1.0, 50000)),
    *(("device_memory_limit", value, none) for value, none in (("off", 0), (False, 0), ("default", 0.8))),
    *(("device_memory_limit", value, size) for value, size in (("0.3", 0.3), (5e9, 5 * 10**9), ("5GiB", 5 << 30))),
    ("memory_limit", "auto", "auto"),
    ("memory_limit", 0, 0),
    ("client_grace", "2m", 120.0),
    ("gpus", "sim:4x256MiB", "sim:4x256MiB"),
    ("job_extra_directives", "--exclusive", ("--exclusive",)),
    ("job_script_prologue", ["a\nb", "{ c; }"], ("a", "b", "{ c; }")),
    ("job_script_prologue", "{ module load x; }", ("{ module load x; }",)),
    ("env", ["A=b=c"], {"A": "b=c"}),
    ("env", {"N": 4}, {"N": "4"}),
    ("security", False, False),
    ("nodes", np.int64(3), 3),
    ("jit_unspill", np.bool_(True), True),
    ("security", np.bool_(False), False),
    ("device_memory_limit", np.float32(0.5), 0.5),
    # one by one, as a flag that is repeated; commas part only what has none itself
    ("resources", ["GPU=1,A=2", "B=3"], {"GPU": 1.0, "A": 2.0, "B": 3.0}),
    ("resources", "A=1,B=2", {"A": 1.0, "B": 2.0}),  # as dask worker has it
    ("resources", ['{"A": 1}'], {"A": 1.0}),
    ("env", ['{"A": "b,C=d"}', "B=2"], {"A": "b,C=d", "B": "2"}),
    *(("nics", value, ("mlx5_0", "mlx5_1:2")) for value in (["mlx5_0", "mlx5_1:2"], ["mlx5_0,mlx5_1:2"])),
    ("rmm_allocator_external_lib_list", ["cupy", "torch"], ("cupy", "torch")),
    ("job_extra_directives", ["--a=1,2", "-b"], ("--a=1,2", "-b")),
]
BAD = [
    *(("nodes", v) for v in (0, -1, True, 1.5, "four", "", [2], "1.0")),
    *(("gpus_per_node", v) for v in (-1, False, np.bool_(True))),
    *(("memory", v) for v in (8, "8", 64_000, "512KiB", 8.0, 0, -1, True, 1.5, "5 Gigs", "5%", "1e999", [1])),
    *(("memory", v) for v in (float("inf"), float("nan"))),
    *(("device_memory_limit", v) for v in (1.5, -1, -0.5, 1, "1", "1.5", 2.0, "5 Gigs", "50%", "-1GB", "", True)),
    *(("device_memory_limit", v) for v in ("auto", float("nan"), float("inf"), "1e999", 10**400)),
    *(("memory_limit", v) for v in (1.5, -1, "50%", True)),
    *(("walltime", v) for v in ("2h30", "30", 0, 0.5, "0.5s", -5, True, "", [1], float("nan"), float("inf"), "1e999h")),
    *(("walltime", v) for v in (30, np.int64(30), 86_400)),
    *(("client_grace", v) for v in (-1, "soon", True, float("nan"), "-3")),
    *(("gpus", v) for v in ("sim:0", "sim:", "sim:4x", "sim:4x0", "sim:4x8", "sim:4x5 Gigs", "sim:-1", "4x1GiB")),
    *(("gpus", v) for v in ("all", 0, "0", "4,5", "")),
    *(("simulate", v) for v in (0, "0", "4x", "4x0", "4x8", "sim:4", "", True, 1.5, [4])),
    *(("ranks", v) for v in ("gpus", 1, "", None)),
    *(("protocol", v) for v in ("UCXX", "TCP", 4)),
    *(("queue", v) for v in ("", " ", "a\nb", "a\x00b", 4, False, ["a"])),
    *(("job_extra_directives", v) for v in (4, ["a\nb"], [4], {"a": "b"}, [""], b"x")),
    *(("job_script_prologue", v) for v in (4, [4], ["a\x00"])),
    *(("dashboard", v) for v in (1, 0, "maybe", [], "")),
    *(("resources", v) for v in ("GPU", {"GPU": "x"}, {"GPU": -1}, {"GPU": True}, {1: 1}, 4, {"": 1})),
    *(
        ("env", v)
        for v in ("A", {"1A": "x"}, {"A B": "x"}, {"A": "x\ny"}, {"A": "\x00"}, {"A": True}, {"A=": ""}, [1], 1)
    ),
]
# Settings that are wrong, but not by the value of one option.
WRONG: tuple[dict[str, object], ...] = (
    *({"nods": "1"}, {"gpus_per_nod": "1"}, {"walltime_s": "1"}, {"zzzzzz": "1"}),
    *({"queue": "a", "partition": "b"}, {"name": "run", "job_name": "other"}),
    *({"cores": "some"}, {"nics": "balanced,mlx5_0"}, {"nics": ""}, {"reserved_cores": "-1"}, {"ranks": "all"}),
    *({"account": 12345}, {"memory": "64000"}, {"python": "srun -n 1 -c 1 python"}, {"host": "10.0.0.1"}),
    *({"dashboard_address": "0.0.0.0:8787"}, {"scheduler_port": "65536"}, {"gpus": "5"}, {"gpus": "0,1"}),
    *({"protocol": "ucx", "security": "true"}, {"protocol": "tls", "security": "false"}),
    *({"protocol": "tcp", "security": "true"}, {"gpus": "sim:4", "gpus_per_node": "2"}),
    *({"simulate": "4", "gpus": "sim:3"}, {"simulate": "4", "gpus": "6"}, {"simulate": "4", "gpus": "8", "nodes": "3"}),
    *({"rmm_async": "true", "rmm_managed_memory": "true"}, {"rmm_release_threshold": "1GB"}),
    *({"rmm_maximum_pool_size": "1GB"}, {"rmm_maximum_pool_size": "1GB", "rmm_managed_memory": "true"}),
    *({"rmm_pool_size": "2GB", "rmm_maximum_pool_size": "1GB"}, {"rmm_pool_size": ".9", "rmm_maximum_pool_size": ".8"}),
    *({"rmm_allocator_external_lib_list": "cupy,numba"}, {"cudf_spill_stats": "1"}, {"rmm_pool_size": "1"}),
    *({"rmm_pool_size": "default"}, {"rmm_maximum_pool_size": "auto"}, {"rmm_async": "maybe"}),
    {"simulate": "4", "gpus_per_node": "2"},
    {"processes": "2", "resource_spec": "x", "shebang": "y", "walltime": "30"},
)
DOORS: dict[str, Callable[[dict[str, Any]], Settings]] = {
    "keyword": lambda wrong: read_settings(wrong, given_from="keyword {name} of SLURMGPUCluster"),
    "flag": lambda wrong: read_settings(wrong, given_from="option --{flag}"),
    "variable": lambda wrong: read_settings({}, environ={f"HPCGPU_{name.upper()}": wrong[name] for name in wrong}),
    "site-file": lambda wrong: read_settings({}, site=Site(name="here", batch="slurm", defaults=wrong)),
}
ANYTHING = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.from_regex(r"[0-9.e:xh GiB-]+")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.integers(), inner, max_size=3),
    max_leaves=5,
)
INSTALLED = yaml.safe_load(Path(dask_jobqueue.__file__).with_name("jobqueue.yaml").read_text())["jobqueue"]
SECTION = {
    **{"name": "me", "cores": 32, "memory": "64GB", "processes": 4, "queue": "gpu", "account": "p1"},
    **{"walltime": "02:00:00", "interface": "ib0", "job-extra-directives": ["--constraint=a100"]},
    **{"job_directives_skip": ["--mem", "mem="], "job-script-prologue": ["module load cuda"], "log-directory": "logs"},
    **{"local-directory": "/scratch", "death-timeout": 300, "python": "/opt/python"},
    **{"scheduler-options": {"dashboard_address": ":0"}, "shebang": "#!/usr/bin/env bash"},
    "worker-command": "distributed.cli.dask_worker",
}


def fails(given: dict[str, object], **more: object) -> str:
    with pytest.raises(ConfigError) as caught:
        read_settings(given, **more)
    return str(caught.value)


def test_none_is_the_default_and_no_limit_as_a_keyword_of_limits() -> None:
    assert read_settings({}) == read_settings({"nodes": None, "cores": None}) == Settings()
    found = read_settings({"device_memory_limit": None, "memory_limit": None})
    assert (found.device_memory_limit, found.memory_limit) == (NO_LIMIT, NO_LIMIT)
    assert found.where("device_memory_limit") == "keyword device_memory_limit"
    in_a_file = read_settings({}, dask_config={"device-memory-limit": None, "memory-limit": None})
    assert (in_a_file.device_memory_limit, in_a_file.memory_limit) == (DEVICE, SHARE)


def test_precedence_and_sources() -> None:
    """Peel the layers off one by one: each time the next one wins and is named."""
    given, environ, dask = {"queue": "a"}, {"HPCGPU_QUEUE": "b"}, {"queue": "c"}
    named = {"given_from": "keyword {name} of SLURMGPUCluster", "site": SITE}
    steps = [
        (read_settings(given, environ=environ, dask_config=dask, **named), "a", "keyword queue of SLURMGPUCluster"),
        (read_settings({}, environ=environ, dask_config=dask, **named), "b", "HPCGPU_QUEUE"),
        (read_settings({}, dask_config=dask, **named), "c", "dask config hpcgpu.queue"),
        (read_settings({}, **named), "gpu", "site here"),
        (read_settings({}), None, "default"),
    ]
    for settings, value, where in steps:
        assert (settings.queue, settings.where("queue")) == (value, where)


def test_names_of_others_and_of_flags() -> None:
    found = read_settings({"partition": "gpu", "project": "p1", "threads_per_worker": 3, "env_extra": ["load x"]})
    assert (found.queue, found.account, found.nthreads) == ("gpu", "p1", 3)
    assert (found.job_script_prologue, found.where("queue")) == (("load x",), "keyword partition")
    flag = read_settings({"client_grace": 5}, given_from="option --{flag}")
    dask = read_settings({}, dask_config={"client-grace": "10s"})
    where = [settings.where("client_grace") for settings in (flag, dask)]
    assert where == ["option --client-grace", "dask config hpcgpu.client-grace"]
    assert "hyphens" in fails({}, dask_config={"job-name": "a", "job_name": "b"})


def test_options_have_a_user_name_and_a_reader() -> None:
    assert {user_name(f) for f in options()} <= set(BY_NAME)
    assert set(KINDS) == {f.metadata["kind"] for f in options()} | {"duration"}


def test_an_unknown_option_of_a_class_gives_the_nearest_there() -> None:
    for place, near in (("LocalGPUCluster", "n_workers"), ("X", "cpu_workers")):
        assert f"did you mean '{near}'?" in fails({"n_worker": 2}, given_from=f"keyword {{name}} of {place}")


def test_environment_of_a_site_module_is_left_alone() -> None:
    environ = {"HPCGPU_ROOT": "/opt", "HPCGPU_VERSION": "1", "HPCGPU_NODES": "", "PATH": "x"}
    environ |= {"HPCGPU_DEBUG": "1", "HPCGPU_LIBHWLOC": "/lib/x", "HPCGPU_KEEP_LAB": "1"}  # ours, and no options
    assert read_settings({}, environ=environ) == Settings()
    assert "did you mean HPCGPU_WALLTIME" in fails({}, environ={"HPCGPU_WALTIME": "1h"})
    assert "cores_per_gpu" in fails({}, environ={"HPCGPU_NCPUS": "4"})


def test_cores_and_ports_are_a_rule_or_a_number_or_names() -> None:
    for given, read in (("all", "all"), ("local", "local"), (8, 8), ("8", 8)):
        assert read_settings({"cores": given}).cores == read
    for rule in ("balanced", "nearest", "ucx", ["nearest"]):
        assert read_settings({"nics": rule}).nics == (rule if isinstance(rule, str) else rule[0])
    for names in ("mlx5_0,mlx5_1:2", ["mlx5_0", "mlx5_1:2"], '["mlx5_0", "mlx5_1:2"]'):
        assert read_settings({"nics": names}).nics == ("mlx5_0", "mlx5_1:2")
    assert read_settings({"reserved_cores": "0"}).reserved_cores == 0


def test_lists_from_the_environment() -> None:
    environ = {
        "HPCGPU_JOB_EXTRA_DIRECTIVES": '["--constraint=a100", "--exclusive"]',
        "HPCGPU_JOB_SCRIPT_PROLOGUE": "module load cuda\nulimit -n 4096\n",
        "HPCGPU_ENV": '{"A": "1"}',
        "HPCGPU_RESOURCES": "GPU=1, MEM=2e9",
        "HPCGPU_DASHBOARD": "off",
    }
    found = read_settings({}, environ=environ)
    assert found.job_extra_directives == ("--constraint=a100", "--exclusive")
    assert found.job_script_prologue == ("module load cuda", "ulimit -n 4096")
    assert (found.env, found.resources, found.dashboard) == ({"A": "1"}, {"GPU": 1.0, "MEM": 2e9}, False)


@pytest.mark.parametrize("text", ["A=b,C=d", "A=b, C=d", "A=,C=d,E=f"])
def test_a_variables_value_has_commas_but_is_not_two_variables(text: str) -> None:
    for value in ("rc,cuda", "verbose,granularity=fine", "a=1,B=2", "x, y", "mlx5_0:1,mlx5_1:1"):
        assert read_settings({"env": [f"A={value}"]}).env == {"A": value}
    said = fails({"env": [text]})
    assert f"{text!r} looks like two variables; give each by itself: 'A=" in said
    as_json = said[said.index("{") : said.index("}") + 1]
    assert read_settings({"env": as_json}).env == {"A": text.removeprefix("A=")}


@pytest.mark.parametrize(("name", "value", "expected"), GOOD)
def test_good_values(name: str, value: object, expected: object) -> None:
    read = read_value(BY_NAME[name], value, "here")
    found = read.value if isinstance(read, Limit) else read
    assert (found, type(found)) == (expected, type(expected) if not isinstance(expected, dict) else MappingProxyType)
    if found is not None:
        assert read_value(BY_NAME[name], f"{found}s" if name == "walltime" else found, "here") == read


@pytest.mark.parametrize("door", DOORS)
def test_errors_of_a_door_are_as_in_its_file(door: str) -> None:
    """Python has values of any type; shells and job scripts have text, and an empty variable is not set."""
    text = ""
    for wrong in (*({name: value} for name, value in BAD), *WRONG):
        if door == "keyword" or all(isinstance(value, str) for value in wrong.values()):
            said = "taken"
            try:
                DOORS[door](wrong)
            except ConfigError as e:
                said = whole(e, as_typed if door == "flag" else str)
            shown = {n: f"NumPy's {value}" if isinstance(value, np.generic) else value for n, value in wrong.items()}
            text += f"{shown}\n    {said}\n"  # NumPy 1 and 2 have other texts for their values
    check_golden(DATA / "errors" / f"{door}.txt", text)


@pytest.mark.parametrize(("name", "value"), BAD, ids=lambda v: repr(v)[:20])
def test_bad_values_say_what_which_and_where(name: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        read_value(BY_NAME[name], value, "keyword x of Y")
    parts = caught.value.parts
    assert (parts[1], parts[-2], parts[-1]) == (name, "keyword x of Y", "")
    assert "\n" not in str(caught.value)


def test_calls_of_other_packages_are_answered_at_once_and_whole() -> None:
    """One of dask-jobqueue's scripts, JURECA's, gpu-bdb's, the book's."""
    call = {"cores": 8, "processes": 4, "worker_extra_args": ["--lifetime", "25m"], "scheduler_options": {"port": 1}}
    said = fails(call | {"walltime": 30, "dashboard_link": "/x", "enable_nvlink": False})
    assert [line.partition("=")[0].partition(":")[0] for line in said.splitlines()] == [
        *("processes", "worker_extra_args", "scheduler_options", "walltime", "dashboard_link"),
    ]
    assert "give dashboard_port" in said
    assert read_settings({"name": "run", "job_name": "run", "enable_rdmacm": False}).job_name == "run"
    assert read_settings({"python": "/opt/my env/bin/python"}).python == "/opt/my env/bin/python"


def test_a_number_is_seconds_but_a_walltime_needs_a_unit() -> None:
    assert read_settings({"drain": 30, "death_timeout": 30, "client_grace": 30}).drain_s == 30  # as Dask's
    with pytest.raises(ConfigError, match="it has no unit"):
        read_settings({}, dask_config={"walltime": 86_400})  # PyYAML reads 24:00:00 so


@draw(st.sampled_from(options()), ANYTHING)
def test_value_is_refused_or_reading_it_again_changes_nothing(option: object, value: object) -> None:
    try:
        found = read_value(option, value, "here")
    except ConfigError:
        return
    if found is not None:
        assert read_value(option, found, "here") == found


@pytest.mark.parametrize("name", sorted(name for name, hint in HINTS.items() if hint.harmless != migration.ANYTHING))
def test_foreign_names_say_what_instead(name: str) -> None:
    assert name not in BY_NAME
    assert plain(HINTS[name].instead) in fails({name: "something else"})
    for value in HINTS[name].harmless:
        assert read_settings({name: value}) == Settings()


def test_keywords_of_dask_cuda_and_dask_jobqueue_have_answers() -> None:
    """dask-cuda 26.10 (local_cuda_cluster.py), those that it removed, LocalCluster's own; dask-jobqueue 0.9."""
    assert not JOBQUEUE.keys() & DASK_CUDA.keys()
    words = """CUDA_VISIBLE_DEVICES n_workers threads_per_worker memory_limit device_memory_limit default_statistics
        enable_cudf_spill cudf_spill_stats data local_directory shared_filesystem protocol enable_tcp_over_ucx
        enable_infiniband enable_nvlink enable_rdmacm rmm_pool_size rmm_maximum_pool_size rmm_managed_memory
        rmm_async rmm_allocator_external_lib_list rmm_release_threshold rmm_log_directory rmm_track_allocations
        jit_unspill log_spilling worker_class pre_import cores memory processes interface nanny protocol
        security shared_temp_directory local_directory death_timeout worker_command worker_extra_args
        job_extra_directives job_directives_skip job_script_prologue job_script_epilogue log_directory shebang
        python job_name name config_name n_workers scheduler_options scheduler_cls silence_logs queue extra
        env_extra header_skip job_extra project account walltime job_cpu job_mem resource_spec"""
    inherited = set(inspect.signature(LocalCluster.__init__).parameters) - {"self", "worker_kwargs"}
    of_the_class = {"loop", "asynchronous"}  # keywords of distributed's Cluster that deploy takes itself
    assert not (set(words.split()) | inherited) - of_the_class - BY_NAME.keys() - HINTS.keys()


def test_local_cuda_keywords() -> None:
    given, environ = read_local_cuda({"n_workers": 2, "CUDA_VISIBLE_DEVICES": [0, 3], "protocol": "ucxx", "data": None})
    found = read_settings(given)
    assert (found.gpus_per_node, found.protocol, environ) == (2, "ucx", {"CUDA_VISIBLE_DEVICES": "0,3"})
    assert read_local_cuda({"CUDA_VISIBLE_DEVICES": "GPU-1, GPU-2"})[1] == {"CUDA_VISIBLE_DEVICES": "GPU-1,GPU-2"}
    for value in ("", [], "0,,1", "0,0", True, 1.5, [True]):
        with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES"):
            read_local_cuda({"CUDA_VISIBLE_DEVICES": value})
    with pytest.raises(ConfigError, match="one worker per GPU"):
        read_local_cuda({"CUDA_VISIBLE_DEVICES": "0,1", "n_workers": 3})
    with pytest.raises(ConfigError, match="say one"):
        read_local_cuda({"gpus_per_node": 1, "n_workers": 3})
    listed = read_local_cuda({"CUDA_VISIBLE_DEVICES": "0,1"})[0]
    assert read_settings(listed, environ={"HPCGPU_GPUS": "sim:4"}).gpus == "sim:2"
    assert read_local_cuda({"gpus": "2"})[0] == {"gpus_per_node": "2"}


@pytest.mark.parametrize(
    ("keywords", "pattern"),
    [
        ({"gpus": -1}, "^gpus: -1 .* keyword gpus of"),
        ({"gpus": "-1"}, "^gpus: '-1' .* keyword gpus of"),
        ({"n_workers": 0}, "^n_workers=0 .set by keyword n_workers of"),
        ({"gpus": "sim:4", "CUDA_VISIBLE_DEVICES": "0,1"}, "leave CUDA_VISIBLE_DEVICES out"),
        ({"memory": "4GB"}, "for each worker: memory_limit"),
        ({"processes": 2, "resource_spec": "x", "shebang": "y"}, "(?s)processes=2.*resource_spec='x'.*shebang='y'"),
    ],
)
def test_error_of_a_local_cluster_has_the_users_keywords(keywords: dict[str, object], pattern: str) -> None:
    with pytest.raises(ConfigError, match=pattern):
        LocalGPUCluster(**keywords)


def test_calls_of_dask_cudas_documents() -> None:
    """Calls as users have them: taken as they are, or answered with what to write here."""
    for limit, expected in ((50000, 50000), ("5GB", 5 * 10**9), (0.3, 0.3), (0, 0), (None, 0)):
        assert read_settings(read_local_cuda({"device_memory_limit": limit})[0]).device_memory_limit == Limit(expected)
    assert read_settings(read_local_cuda({"protocol": "ucx"})[0]).protocol == "ucx"
    jit = read_local_cuda({"n_workers": 10, "device_memory_limit": "1GB", "jit_unspill": True})[0]
    assert read_settings(jit).jit_unspill
    call = {"protocol": "tcp", "n_workers": 2, "CUDA_VISIBLE_DEVICES": "0,1", "device_memory_limit": 10**10}
    call |= {"local_directory": "/scratch/me"}
    assert read_settings(read_local_cuda(call)[0]).gpus_per_node == 2
    for address in (":8787", "8787", 8787, "127.0.0.1:8787", "localhost:8787"):
        assert read_settings(read_local_cuda(call | {"dashboard_address": address})[0]).dashboard_port == 8787
    assert not read_settings(read_local_cuda(call | {"dashboard_address": None})[0]).dashboard
    assert read_settings(read_local_cuda(call | {"scheduler_port": 8786})[0]).scheduler_port == 8786
    for port in (True, -1, 1 << 16, "", "a", "127.0.0.1:1"):
        assert "scheduler_port" in fails({"scheduler_port": port})
    assert read_settings({"silence_logs": 50, "processes": True, "host": "127.0.0.1"}) == read_settings({})
    rmm = {"rmm_pool_size": 10**10, "rmm_maximum_pool_size": 0.9, "rmm_allocator_external_lib_list": "cupy,torch"}
    taken = read_settings(read_local_cuda(call | rmm)[0])
    assert (taken.rmm_pool_size, taken.rmm_maximum_pool_size) == (Limit(10**10), Limit(0.9))
    assert taken.rmm_libraries == ("cupy", "torch")


def test_what_the_site_has() -> None:
    both = {"gpus": "sim:4", "gpus_per_node": 4}
    for given, number in (({}, 4), ({"gpus_per_node": 2}, 2), ({"gpus": "sim:8"}, None), (both, 4)):
        assert read_settings(given, site=SITE).gpus_per_node == number
    assert re.search("keyword gpus_per_node.*a node of here has 4", fails({"gpus_per_node": 5}, site=SITE))


def test_what_the_site_lists_stays() -> None:
    """One more directive of the user's must not lose those that the site cannot do without."""
    needed = ["-l filesystems=home", "--constraint=gpu", "-A p"]
    defaults = {"job_extra_directives": needed, "job_script_prologue": ["module load a"]}
    site = Site(name="s", batch="pbs", defaults=defaults)
    given = {"job_extra_directives": ["--constraint=big", "-l filesystems=eagle", "-l x=1", "-A q", "=odd"]}
    found = read_settings(given | {"job_script_prologue": ["module load b"]}, site=site)
    assert found.job_extra_directives == ("--constraint=big", "-l filesystems=eagle", "-l x=1", "-A q", "=odd")
    assert found.job_script_prologue == ("module load a", "module load b")
    found = read_settings({"job_extra_directives": ["-l x=1"]}, site=site)
    assert found.job_extra_directives == ("-l filesystems=home", "--constraint=gpu", "-A p", "-l x=1")
    assert found.where("job_extra_directives") == "keyword job_extra_directives and site s"


def test_which_site() -> None:
    everywhere = {"environ": {"HPCGPU_SITE": "b"}, "dask_config": {"site": "c"}}
    assert chosen_site({"site": "a"}, **everywhere) == "a"
    assert chosen_site({}, **everywhere) == "b"
    assert chosen_site({}, dask_config={"site": "c"}) == "c"
    assert chosen_site({}, environ={"HPCGPU_SITE": ""}) is None
    with pytest.raises(ConfigError, match=r"set by dask config hpcgpu\.site"):
        chosen_site({}, dask_config={"site": 4})
    for section in (4, "nodes", ["nodes"], {1: 2}):  # not a section
        assert "dask config hpcgpu is" in fails({}, dask_config=section)
        with pytest.raises(ConfigError, match="dask config hpcgpu is"):
            chosen_site({}, dask_config=section)


@pytest.mark.parametrize(
    ("given", "nodes", "gpus"),
    [
        ({"simulate": "4x256MiB"}, 1, "sim:4x256MiB"),
        ({"simulate": 4, "gpus": 8}, 2, "sim:4"),  # so many of all
        ({"simulate": "4", "gpus": "8", "nodes": 2}, 2, "sim:4"),
        ({"simulate": "4", "nodes": 3}, 3, "sim:4"),
        ({"simulate": "4", "gpus": "sim:4x256MiB"}, 1, "sim:4"),  # the same, by the short form
    ],
)
def test_simulated_gpus_of_each_node_go_with_nodes_or_a_total(given: dict[str, object], nodes: int, gpus: str) -> None:
    found = read_settings(given)
    assert (found.nodes, found.gpus, found.where("gpus")) == (nodes, gpus, "keyword simulate")


def test_simulated_gpus_of_a_higher_layer_win() -> None:
    assert parse_simulated("sim:4x256MiB") == parse_simulated("4x256MiB", "") == SimulatedGpus(4, 256 << 20)
    environ = {"HPCGPU_SIMULATE": "4x1GiB"}
    assert read_settings({}, environ=environ).gpus == "sim:4x1GiB"
    assert read_settings({"gpus": "sim:1"}, environ=environ).gpus == "sim:1"
    assert read_settings({"gpus_per_node": 2}, environ=environ).gpus == "sim:2x1GiB"  # a script takes fewer


def test_jit_unspill_by_dask_cudas_variable() -> None:
    for value, expected in (("1", True), ("True", True), ("0", False)):
        found = read_settings({}, environ={"DASK_JIT_UNSPILL": value})
        assert (found.jit_unspill, found.where("jit_unspill")) == (expected, "DASK_JIT_UNSPILL")
    both = read_settings({}, environ={"DASK_JIT_UNSPILL": "1", "HPCGPU_JIT_UNSPILL": "0"})
    assert (both.jit_unspill, both.where("jit_unspill")) == (False, "HPCGPU_JIT_UNSPILL")
    assert "DASK_JIT_UNSPILL" in fails({}, environ={"DASK_JIT_UNSPILL": "maybe"})


def test_a_security_object_says_what_to_write() -> None:
    """As dask-jobqueue's users give it, with certificates of their own or temporary ones."""
    for given in (Security(), Security.temporary()):
        with pytest.raises(ConfigError, match=r"makes its own certificate, .*; leave security out \(TLS is on\), or"):
            read_settings({"security": given})


# --- Dask's configuration for dask-jobqueue


def read(section: dict[str, Any], given: dict[str, object] | None = None, **more: Any) -> Settings:
    return read_settings(given or {}, jobqueue=("jobqueue.slurm", section), **more)


@pytest.mark.parametrize("system", ["slurm", "pbs"])
def test_what_dask_jobqueue_installs_says_nothing(system: str) -> None:
    section = without(INSTALLED[system], INSTALLED[system])
    assert section == {}
    assert read(section) == Settings()
    assert ignored(INSTALLED[system]) == ()


def test_what_a_section_means_here() -> None:
    found = read(SECTION, {"gpus_per_node": 4})
    assert (found.job_name, found.queue, found.account, found.walltime_s) == ("me", "gpu", "p1", 7200)
    assert (found.memory_bytes, found.cores_per_gpu, found.cores) == (64 * 10**9, 8, "all")
    assert (found.interface, found.python, found.death_timeout_s) == ("ib0", "/opt/python", 300.0)
    assert (found.log_directory, found.local_directory) == ("logs", "/scratch")
    assert found.job_extra_directives == ("--constraint=a100",)
    assert found.job_directives_skip == ("--mem",)
    assert found.job_script_prologue == ("module load cuda",)
    assert found.where("walltime") == "dask config jobqueue.slurm.walltime"
    assert found.where("cores_per_gpu") == "dask config jobqueue.slurm.cores"


def test_it_stands_below_hpcgpus_own_section_and_above_the_site() -> None:
    defaults = {"queue": "site", "interface": "eth0", "cores_per_gpu": 3, "job_extra_directives": ["--exclusive"]}
    site = Site(name="here", batch="slurm", nodes={"gpu": NodeType(gpus=2)}, defaults=defaults)
    own = {"queue": "own"}
    found = read({"queue": "theirs", "interface": "ib0", "cores": 16}, dask_config=own, site=site)
    assert (found.queue, found.interface, found.cores_per_gpu) == ("own", "ib0", 8)
    assert read({"queue": "theirs"}, environ={"HPCGPU_QUEUE": "mine"}).queue == "mine"
    # what the site's jobs cannot do without stays
    assert read(SECTION, site=site).job_extra_directives == ("--exclusive", "--constraint=a100")


def test_jobqueue_cores_are_divided_and_errors_have_a_place() -> None:
    assert read({"cores": 30}, {"gpus": "sim:4"}).cores_per_gpu == 7
    assert read({"cores": 2}, {"gpus_per_node": 4}).cores_per_gpu == 1
    assert read({"cores": 30, "job-cpu": 8}, {"gpus_per_node": 4}).cores_per_gpu == 2
    assert read({"cores": 30}, {"gpus_per_node": 4, "cores_per_gpu": 1}).cores_per_gpu == 1
    assert read({"cores": 30}).cores_per_gpu is None  # nobody has said over how many
    with pytest.raises(ConfigError, match="cores of a job"):
        read({"cores": "many"}, {"gpus_per_node": 4})
    with pytest.raises(ConfigError, match=r"set by dask config jobqueue\.slurm\.walltime"):
        read({"walltime": "soon"})
    with pytest.raises(ConfigError, match=r"dask config jobqueue\.slurm is 'x'"):
        read_settings({}, jobqueue=("jobqueue.slurm", "x"))  # type: ignore[arg-type]


def test_older_names_count_where_the_newer_say_nothing() -> None:
    old = {"project": "p", "job-extra": ["-C x"], "env-extra": ["a"], "header-skip": ["-n"]}
    found = read({**old, "account": None, "job-extra-directives": []})
    assert (found.account, found.job_extra_directives) == ("p", ("-C x",))
    assert (found.job_script_prologue, found.job_directives_skip) == (("a",), ("-n",))
    assert read({**old, "account": "new"}).account == "new"


def test_what_is_ignored_is_named_with_what_to_write() -> None:
    said = ignored(SECTION)
    assert [text.split()[0].rstrip(":") for text in said] == ["processes", "job-directives-skip", "scheduler-options"]
    assert "give gpus_per_node" in said[0]
    assert ignored({"python": "apptainer exec x python", "local-directory": "$TMPDIR", "nonsense": 1}) == (
        "python: 'apptainer exec x python' (here it is one program)",
        "local-directory: '$TMPDIR' (workers have their folders there in any case)",
        "nonsense (no option of hpcgpu)",
    )
    assert read({"python": "a b", "local-directory": "$TMPDIR"}) == Settings()
    assert read({"local-directory": "$SCRATCH/x"}).local_directory == "$SCRATCH/x"


@draw(st.sampled_from(["slurm", "pbs"]), st.data())
def test_no_key_is_lost(system: str, data: st.DataObject) -> None:
    """Whatever a section has is taken, or named as ignored."""
    values = {"cores": 4, "job-cpu": 4, "walltime": "1h", "memory": "1GB", "death-timeout": 9, "name": "n"}
    keys = data.draw(st.sets(st.sampled_from(sorted(INSTALLED[system]))))
    section = {key: values.get(key, ["-x"] if "directives" in key or "skip" in key else "--some") for key in keys}
    _, taken = translate(section, 2)
    named = {text.split()[0].rstrip(":") for text in ignored(section)}
    replaced = {"cores"} if "job-cpu" in keys else set()
    for new, old in (("job-extra-directives", "job-extra"), ("job-directives-skip", "header-skip")):
        replaced |= {old} if new in keys else set()
    replaced |= {"env-extra"} if "job-script-prologue" in keys else set()
    assert keys - set(taken.values()) - named <= replaced


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    """The environment of a user who has configured dask-jobqueue."""
    (tmp_path / ".config" / "dask").mkdir(parents=True)
    text = "jobqueue: {slurm: {queue: theirs, processes: 4, walltime: '01:00:00'}, pbs: {queue: other}}"
    (tmp_path / ".config" / "dask" / "jobqueue.yaml").write_text(text)
    return ranks.environment(HOME=str(tmp_path))


def test_ranks_do_not_read_it_nor_import_dask_for_it(home: dict[str, str]) -> None:
    code = "import sys; from hpcgpu.deploy.settings import read; print(read({}, '').settings.queue, "
    assert python(code + "'dask' in sys.modules)", env=home).stdout == "None False\n"


@pytest.mark.parametrize("first", ["", "import dask_jobqueue; "])
def test_submission_reads_its_section_and_logs_ignored_keys_once(home: dict[str, str], first: str) -> None:
    """Defaults that dask_jobqueue has added at its import are nobody's wish: no -t 00:30:00 of its."""
    code = first + "from hpcgpu.deploy.jobs.planned_job import read_job\nfor b in ('slurm', 'slurm', 'pbs'):\n"
    code += "    _, s, system = read_job({'gpus_per_node': 4}, 'keyword {name}', (), b); print(system.script(s))"
    done = python(code, env=home)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("--partition=theirs") == 2
    assert done.stdout.count("--time=01:00:00") == 2
    assert done.stdout.count("-q other") == 1
    assert "00:30:00" not in done.stdout
    assert done.stderr.count("hpcgpu: dask config jobqueue.slurm: ignored are processes") == 1
    code = "from hpcgpu import SLURMGPUCluster\nSLURMGPUCluster(nodes=0)"
    assert "jobqueue.slurm: ignored are processes" in python(code, env=home).stderr
