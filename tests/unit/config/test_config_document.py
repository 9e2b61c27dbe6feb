"""The run document: one word of an argv, the same after reading, and nothing else is read."""

import json
import shlex
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from programs import python
from waiting import scaled

from hpcgpu import config
from hpcgpu.agent.__main__ import read_bootstrap_settings
from hpcgpu.config.document import SHAPES
from hpcgpu.config.layers import read_settings
from hpcgpu.errors import ConfigError
from hpcgpu.model import RunDocument, Settings
from hpcgpu.model.allocation import WRITTEN
from hpcgpu.model.settings import CUDF, RMM, options, user_name

# What a command line carries: no NUL, no half of a surrogate pair. Names and values of options are one line.
WORD = st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"]), max_size=20)
LINE = st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=20).filter(str.strip)
COUNT = st.integers(1, 10**6)
TIME = st.floats(0, 1e9)
LIMIT = st.one_of(st.just(0), st.floats(1e-9, 1.0), st.integers(1024, 1 << 60))
BY_KIND: dict[str, st.SearchStrategy[object]] = {
    "count": COUNT,
    "number": COUNT,
    "cores": COUNT | st.sampled_from(["all", "local"]),
    "nics": st.sampled_from(["balanced", "nearest", "ucx"]) | st.lists(st.sampled_from(["mlx5_0", "hsn1"]), min_size=1),
    "bytes": st.integers(1 << 20, 1 << 60),
    "duration": COUNT.map("{}s".format),
    **dict.fromkeys(("seconds", "amount"), TIME),
    **{"limit": LIMIT, "device-limit": LIMIT, "host-limit": LIMIT | st.just("auto")},
    "gpus": st.builds("sim:{}x{}MiB".format, st.integers(1, 16), COUNT),
    "text": LINE,
    "texts": st.lists(LINE, max_size=3),
    "lines": st.lists(LINE, max_size=3),
    "flag": st.booleans(),
    "port": st.integers(0, 65535),
    "numbers": st.dictionaries(LINE, TIME, max_size=3),
    "environment": st.dictionaries(st.from_regex(r"[A-Z_][A-Z0-9_]{0,8}", fullmatch=True), LINE, max_size=3),
}


TOGETHER: list[dict[str, object]] = [
    {},
    {"rmm_pool_size": 0.5, "rmm_maximum_pool_size": 0.9, "rmm_log_directory": "logs", "rmm_managed_memory": True},
    {"rmm_async": True, "rmm_release_threshold": "1GB", "rmm_allocator_external_lib_list": ["cupy,torch"]},
    {"enable_cudf_spill": True, "cudf_spill_stats": 2, "rmm_track_allocations": True},
]
TERMS = {"workers_per_gpu": 1, "cpu_workers": 0, "rendezvous": "mpi", "death_timeout_s": 60.0}
FOLLOWER = """
import sys
from hpcgpu.agent import __main__ as agent
from hpcgpu.plan.layout import RankRecord, plan_layout
place = {"RANK": "1", "SIZE": "2", "LOCAL_RANK": "1"}
me = agent.Rank(sys.argv[1], {f"OMPI_COMM_WORLD_{name}": value for name, value in place.items()})
plan_layout([RankRecord(*map(me._record(None).get, RankRecord._fields))])
print(*sys.modules)
"""


def values() -> st.SearchStrategy[dict[str, object]]:
    """Any options with any values, but for those that are refused together."""
    one = {
        user_name(f): st.sampled_from(f.metadata["choices"])
        if f.metadata["kind"] == "choice"
        else BY_KIND[f.metadata["kind"]]
        for f in options()
        if f.name not in ("security", "gpus_per_node", "simulate", *RMM, *CUDF)
    }
    with_rapids = st.builds(lambda a, b: a | b, _any_of(one, "gpus"), st.sampled_from(TOGETHER))
    mixed = _any_of(one) | with_rapids
    return mixed.filter(
        lambda v: (v.get("protocol"), v.get("rendezvous")) != ("ucx", "mpi") and not str(v.get("python")).split()[1:]
    )


def _any_of(one: dict[str, st.SearchStrategy[object]], *but: str) -> st.SearchStrategy[dict[str, object]]:
    return st.fixed_dictionaries({}, optional={name: s for name, s in one.items() if name not in but})


@example({}, "gang", ["\x7f\n\x1b\udc80"], "\x7f")
@given(values(), st.sampled_from(SHAPES), st.lists(WORD, max_size=3), WORD)
def test_read_render_is_the_same(given: dict[str, object], shape: str, script: list[str], folder: str) -> None:
    whole = RunDocument(read_settings(given), shape, tuple(script), folder)
    text = config.render_document(whole)
    assert config.read_document(text) == whole
    assert config.render_document(config.read_document(text)) == text
    assert text.isascii()
    assert text.isprintable()
    assert shlex.split(shlex.quote(text)) == [text]


def test_document_has_changed_and_bootstrap_settings_only() -> None:
    a = RunDocument(read_settings({"nodes": 2, "queue": "q", "env": {"A": "1", "B": "2"}}))
    b = RunDocument(read_settings({"env": {"B": "2", "A": "1"}, "queue": "q", "nodes": 2}))
    assert config.render_document(a) == config.render_document(b)
    raw = json.loads(config.render_document(RunDocument(read_settings({"nodes": 2, "nthreads": 1}))))
    assert raw["settings"] == {"nodes": 2, **TERMS}
    assert raw["sources"] == {"nodes": "keyword nodes", "nthreads": "keyword nthreads"}


def test_through_a_shell_and_an_argv() -> None:
    whole = RunDocument(read_settings({"env": {"A": 'it\'s "$HOME" `x` \\ \u00e9 %s'}}), script=("a b.py", "", "'"))
    line = shlex.join([sys.executable, "-c", "import sys; print(sys.argv[1])", config.render_document(whole)])
    done = subprocess.run(["/bin/sh", "-c", line], capture_output=True, text=True, timeout=scaled(60), check=True)
    assert config.read_document(done.stdout.rstrip("\n")) == whole
    with pytest.raises(ConfigError, match="at most 131055"):
        config.render_document(replace(RunDocument(), script=("x" * 140_000,)))


def changed(**changes: object) -> str:
    return json.dumps(json.loads(config.render_document(RunDocument(Settings(nodes=2)))) | changes)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        *((text, "not a run document") for text in ("", "nodes=2", "[1]", "{}")),
        (changed(version=1), "version 1, but this hpcgpu reads version 2"),
        (changed(version="1"), "version '1'"),
        (changed(version=True), "version True"),
        (changed(extra=1), "keys"),
        (changed(shape="elastic"), "shape: 'elastic'; allowed: one of gang, in-allocation"),
        (changed(shape=1), "shape"),
        (changed(script="a.py"), "script"),
        *((changed(folder=None), "folder"), (changed(launch=1), "launch"), (changed(exit_file=1), "exit_file")),
        (changed(sources={"nodes": 1}), "sources"),
        (changed(sources=[]), "sources"),
        (changed(settings=[]), "settings"),
        (changed(settings={"nods": 1}), "settings: 'nods'; allowed"),
        *((changed(settings={"nodes": value}), "nodes: ") for value in ("2", 0, None)),
        (changed(settings={"job_extra_directives": "--x"}), "settings.job_extra_directives"),
        (changed(settings={"sources": {}}), "settings: 'sources'"),
        (changed(settings={"env": {"A": "x\ny"}}), "env"),
        (changed(settings={"protocol": "http"}), "protocol"),
    ],
)
def test_nothing_else_is_read(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.read_document(text)
    assert said in str(caught.value)


@given(given=values())
def test_the_terms_that_every_rank_reads_are_the_settings(given: dict[str, object]) -> None:
    settings = read_settings(given)
    whole = RunDocument(settings, "gang", folder="/a/b", launch="1f", exit_file="/a/exit")
    terms = read_bootstrap_settings(config.render_document(whole))
    expected = {"shape": "gang", "folder": "/a/b", "launch": "1f", "exit_file": "/a/exit"}
    assert terms._asdict() == {**expected, **{name: getattr(settings, name) for name in WRITTEN}}


@pytest.mark.parametrize("text", ["", "[1]", "{}", changed(settings={"nods": 1}), changed(settings={"nodes": 2})])
def test_a_document_without_terms_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="run document"):
        read_bootstrap_settings(text)


def test_a_rank_that_only_waits_makes_no_dataclass() -> None:
    done = python(FOLLOWER, config.render_document(RunDocument(read_settings({"gpus": "sim:2"}))), check=True)
    assert not {"dataclasses", "inspect", "pathlib", "shutil", "asyncio", "psutil"} & set(done.stdout.split())


@pytest.mark.parametrize("line", ["import hpcgpu.config", "from hpcgpu import GPURunner"])
def test_reading_is_light(line: str) -> None:
    """Every leader reads a document, and every rank of a script makes a runner."""
    code = f"import sys; {line}; print(*sorted({{m.partition('.')[0] for m in sys.modules}}))"
    imported = set(python(code, check=True).stdout.split())
    assert not {"msgspec", "yaml", "difflib", "distributed", "numpy", "mpi4py"} & imported
