"""What pip installs: one version, types for users, data files; and what stands beside the package for people."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
import tomllib
from importlib import metadata

import pytest
import yaml
from paths import PACKAGE, ROOT
from waiting import scaled

import hpcgpu

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_version_stands_in_one_place() -> None:
    assert "version" in PROJECT["dynamic"]
    assert "version" not in PROJECT
    assert metadata.version("hpcgpu") == hpcgpu.__version__
    assert "version" not in yaml.safe_load((ROOT / "CITATION.cff").read_text())


def test_type_checkers_see_what_users_import() -> None:
    """The stub names every public name, from the module where it is."""
    stub = ast.parse((ROOT / "hpcgpu/__init__.pyi").read_text())
    seen = {a.asname: (n.module, a.name) for n in stub.body if isinstance(n, ast.ImportFrom) for a in n.names}
    assert {*seen, "__version__"} == set(hpcgpu.__all__)
    for name, (module, there) in seen.items():
        assert module
        assert getattr(importlib.import_module(module), there) is getattr(hpcgpu, name)
        assert module == hpcgpu._HOMES[name], name


def test_the_wheel_has_what_users_need() -> None:
    """Hatchling lists the files without building the wheel."""
    code = """
import sys
from hatchling.builders.wheel import WheelBuilder
builder = WheelBuilder(sys.argv[1])
forced = builder.config.get_force_include().values()
print(builder.metadata.version, *sorted(f.distribution_path for f in builder.recurse_included_files()), *forced)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, ROOT], capture_output=True, text=True, timeout=scaled(60), check=True
    )
    version, *files = done.stdout.split()
    assert version == hpcgpu.__version__
    here = {str(p.relative_to(ROOT)) for p in PACKAGE.rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    assert {"hpcgpu/py.typed", "hpcgpu/__init__.pyi", "hpcgpu/host/pbs_ssh.sh"} <= set(files)
    assert {"hpcgpu/data/site_configs", "hpcgpu/data/jobscripts"} <= set(files)
    assert here == {f for f in files if not f.startswith("hpcgpu/data/")}


def test_requirements_of_tests_and_documentation_are_pinned() -> None:
    def plain(name: str) -> str:
        return re.sub(r"[-_.]+", "-", name).lower()

    extras = PROJECT["optional-dependencies"]
    needed = [*PROJECT["dependencies"], *(r for e in ("dev", "docs", "mpi-runtime", "jobqueue") for r in extras[e])]
    pins = "".join((ROOT / f"constraints{name}.txt").read_text() for name in ("", "-docs"))
    pinned = {plain(line.partition("==")[0]) for line in pins.splitlines()}
    assert {plain(re.split(r"[<>=!~;\[ ]", word)[0]) for word in needed} <= pinned


def test_links_of_the_documentation_lead_to_files() -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
        assert [link for link in links if not (page.parent / link).exists()] == [], page


def test_the_documentation_has_every_public_name() -> None:
    text = (ROOT / "docs/reference/api.md").read_text()
    shown = re.findall(r"^\.\. auto\w+:: (?:hpcgpu\.)?(\w+)$", text, re.MULTILINE)
    assert set(shown) == set(hpcgpu.__all__) - {"__version__"}


_HOOKS = {"batch", "entry_point", "waits_in_queue", "patience", "sync"}  # of the cluster classes among themselves
_FOR_STORES = {"adopt", "allocation_of", "buffer_of", "empty_as", "give_back", "pack", "pack_each"}
_FOR_STORES |= {"synchronize", "to_host", "unpack"}


@pytest.mark.parametrize(
    ("module", "name", "internal"),
    [
        ("hpcgpu", "SLURMGPUCluster", _HOOKS),
        ("hpcgpu", "GPURunner", set()),
        ("hpcgpu.sim", "SimGpu", _FOR_STORES),
        ("hpcgpu.sim", "SimArray", set()),
    ],
)
def test_the_documentation_has_every_public_member(module: str, name: str, internal: set[str]) -> None:
    """Of the classes that users make: methods and properties by ``:members:``, the others in their docstrings."""
    text = (ROOT / "docs/reference/api.md").read_text()
    block = re.search(rf"^\.\. autoclass:: (?:{re.escape(module)}\.)?{name}\n((?: +.*\n)*)", text, re.MULTILINE)
    assert block
    made = getattr(importlib.import_module(module), name)
    own = [vars(c) for c in made.__mro__ if c.__module__.startswith("hpcgpu.")]
    public = {n for members in own for n in members if not n.startswith("_")} - internal
    shown = re.search(r":members:((?: .*\n)+)", block[1])
    assert public == set(re.findall(r"\w+", shown[1] if shown else ""))


def test_the_counters_of_a_simulated_gpu_are_documented() -> None:
    """Attributes that an object gets when it is made stand in its class's docstring, which the page shows."""
    sim = importlib.import_module("hpcgpu.sim")
    counters = {name for name in vars(sim.SimGpu(1 << 20)) if not name.startswith("_")}
    assert {"peak_bytes", "h2d_copies", "d2h_bytes"} <= counters
    assert counters <= set(re.findall(r"\w+", inspect.getdoc(sim.SimGpu) or ""))
    assert ".. autofunction:: hpcgpu.sim.dask.register\n" in (ROOT / "docs/reference/api.md").read_text()


def test_nothing_is_cited_that_is_not_in_the_repository() -> None:
    """A comment that gives its source names a page of docs/facts/, or a project and its version."""
    folders = ("hpcgpu", "docs", "scripts", "benchmarks", "tests")
    pages = [p for name in folders for suffix in ("py", "pyi", "md", "sh") for p in (ROOT / name).rglob(f"*.{suffix}")]
    cited = {(page, name) for page in pages for name in re.findall(r"\b(?:docs/)?facts/[\w.-]+", page.read_text())}
    assert [(str(page), name) for page, name in cited if not (ROOT / name).exists()] == []
