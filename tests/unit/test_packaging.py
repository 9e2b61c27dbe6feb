"""What pip installs: one version, types for users, data files; and what stands beside the package for people."""

import ast
import email
import importlib
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import commands
import pytest
import yaml
from paths import PACKAGE, ROOT
from readme_renderer import markdown
from waiting import scaled

import hpcgpu
from hpcgpu.deploy import site_files

TOML = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, WHEEL = TOML["project"], TOML["tool"]["hatch"]["build"]["targets"]["wheel"]
INCLUDED = {name: place for name, place in WHEEL["force-include"].items() if place.startswith("hpcgpu/data/")}
_HOOKS = {"batch", "entry_point", "waits_in_queue", "patience", "sync"}  # of the cluster classes among themselves
_FOR_STORES = {"adopt", "allocation_of", "buffer_of", "empty_as", "give_back", "pack"}
_FOR_STORES |= {"synchronize", "to_host", "unpack"}


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


@pytest.mark.parametrize("name", INCLUDED)
def test_data_files_are_found_in_a_checkout_and_in_a_wheel(name: str, tmp_path: Path) -> None:
    assert site_files.package_folder(name) == ROOT / name
    module = tmp_path / "hpcgpu" / "deploy" / "site_files.py"
    module.parent.mkdir(parents=True)
    shutil.copy(ROOT / "hpcgpu" / "deploy" / "site_files.py", module)
    installed = tmp_path / INCLUDED[name]
    installed.mkdir(parents=True)
    assert runpy.run_path(str(module))["package_folder"](name) == installed
    assert {"site_configs", "jobscripts"} <= INCLUDED.keys()
    assert site_files.folders()[1:] == (ROOT / "site_configs",)


def build(kind: str, source: Path, into: Path, **env: str) -> Path:
    """Build with hatchling, in a process of its own: it imports hatch_build.py of the source."""
    argv = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(into)]
    env = {"PATH": os.environ["PATH"], "SOURCE_DATE_EPOCH": "1700000000", **env}
    subprocess.run(argv, cwd=source, env=env, check=True, capture_output=True, timeout=scaled(60))
    (built,) = into.iterdir()
    return built


def test_the_wheel_of_a_lean_sdist_has_what_users_need(tmp_path: Path) -> None:
    """Other folder, other times of files: the wheel of the checkout is the same bytes."""
    with tarfile.open(build("sdist", ROOT, tmp_path / "sdist")) as archive:
        names = {name.partition("/")[2].partition("/")[0] for name in archive.getnames()}
        archive.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    assert not names & {"tests", "docs", "docker", "benchmarks", "scripts", "examples"}
    wheel = build("wheel", source, tmp_path / "wheel")
    assert wheel.read_bytes() == build("wheel", ROOT, tmp_path / "again").read_bytes()
    with zipfile.ZipFile(wheel) as contents:
        files = {name for name in contents.namelist() if ".dist-info/" not in name}
    here = {str(p.relative_to(ROOT)) for p in PACKAGE.rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    assert {"hpcgpu/py.typed", "hpcgpu/__init__.pyi", "hpcgpu/host/pbs_ssh.sh"} <= files
    assert {f"hpcgpu/data/{name}" for name in ("site_configs/delta.yaml", "jobscripts/slurm.sbatch")} <= files
    assert here == {name for name in files if not name.startswith("hpcgpu/data/")}


@pytest.mark.parametrize("url", ["", "https://example.org/owner/hpcgpu"])
def test_readme_of_a_wheel_has_no_dead_link(url: str, tmp_path: Path) -> None:
    with zipfile.ZipFile(build("wheel", ROOT, tmp_path, HPCGPU_URL=url)) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        facts = email.message_from_string(archive.read(name).decode())
    html = markdown.render(str(facts.get_payload()))
    assert html
    links = [part.partition('"')[0] for word in ('href="', 'src="') for part in html.split(word)[1:]]
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
    assert any(url and link.startswith(url) for link in links) == bool(url)
    assert bool(facts.get_all("Project-URL")) == bool(url)


def test_recipes_ask_for_what_pip_asks_for() -> None:
    recipe = yaml.safe_load((ROOT / "packaging/conda/recipe.yaml").read_text())
    assert recipe["context"]["version"] == hpcgpu.__version__
    names = {"dask": "dask-core"}  # of conda-forge
    bounds = {tuple(re.split("(?=>=)", word)) for word in PROJECT["dependencies"]}
    python = ("python", PROJECT["requires-python"])
    assert {tuple(word.split()) for word in recipe["requirements"]["run"] if ">=" in word} == {
        python,
        *((names.get(name, name), bound) for name, bound in bounds),
    }
    package = (ROOT / "packaging/spack/spack_repo/hpcgpu/packages/py_hpcgpu/package.py").read_text()
    assert f'version("{hpcgpu.__version__}")' in package
    asked = {(name, f">={low}") for name, low in re.findall(r'depends_on\("(?:py-)?([\w-]+)@([\d.]+):"', package)}
    plain = {(name, re.sub(r"(\.0)+$", "", bound)) for name, bound in bounds}  # to Spack 2.0 is above 2
    (dashboard,) = PROJECT["optional-dependencies"]["dashboard"]
    others = {tuple(re.split("(?=>=)", word)) for word in (dashboard, *TOML["build-system"]["requires"])}
    assert asked == {python, *plain, *others}
    definition = (ROOT / "packaging/apptainer/hpcgpu.def").read_text()
    checks = definition.partition("%test\n")[2].partition("%")[0].strip().split("\n")
    for command in (*recipe["tests"][1]["script"], *checks):
        commands.check(command)


def test_easyconfig_and_module_file_are_of_this_version() -> None:
    """EasyBuild resolved the one, Lmod loaded the other, by hand (docs/how-to/environments.md)."""
    (easyconfig,) = (ROOT / "packaging/easybuild").iterdir()
    recipe = runpy.run_path(str(easyconfig))
    assert easyconfig.name == f"hpcgpu-{hpcgpu.__version__}-{'-'.join(recipe['toolchain'].values())}.eb"
    there = {"click", "cryptography", "distributed", "numpy", "psutil", "rich"}  # in its Python, dask and SciPy bundles
    listed = {name.lower() for name, *_ in (*recipe["dependencies"], *recipe["exts_list"])}
    assert {re.split("[>=]", word)[0] for word in PROJECT["dependencies"]} - there <= listed
    for command in recipe["sanity_check_commands"]:
        commands.check(command)
    (module,) = (ROOT / "packaging/lmod/hpcgpu").iterdir()
    assert module.name == f"{hpcgpu.__version__}.lua"


def test_requirements_of_tests_and_documentation_are_pinned() -> None:
    def plain(name: str) -> str:
        return re.sub(r"[-_.]+", "-", name).lower()

    extras = PROJECT["optional-dependencies"]
    needed = [*PROJECT["dependencies"], *(r for e in ("dev", "docs", "mpi-runtime", "jobqueue") for r in extras[e])]
    pins = "".join((ROOT / f"constraints{name}.txt").read_text() for name in ("", "-docs"))
    pinned = {plain(line.partition("==")[0]) for line in pins.splitlines()}
    assert {plain(re.split(r"[<>=!~;\[ ]", word)[0]) for word in needed} <= pinned


def test_the_documentation_has_every_public_name() -> None:
    text = (ROOT / "docs/reference/api.md").read_text()
    shown = re.findall(r"^\.\. auto\w+:: (?:hpcgpu\.)?(\w+)$", text, re.MULTILINE)
    assert set(shown) == set(hpcgpu.__all__) - {"__version__"}


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


def test_nothing_is_cited_that_is_not_in_the_repository() -> None:
    """A comment that gives its source names a page of docs/facts/, or a project and its version."""
    folders = ("hpcgpu", "docs", "scripts", "benchmarks", "tests")
    pages = [p for name in folders for suffix in ("py", "pyi", "md", "sh") for p in (ROOT / name).rglob(f"*.{suffix}")]
    cited = {(page, name) for page in pages for name in re.findall(r"\b(?:docs/)?facts/[\w.-]+", page.read_text())}
    assert [(str(page), name) for page, name in cited if not (ROOT / name).exists()] == []
