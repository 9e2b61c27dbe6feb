"""What is published: the sdist holds what a wheel is built from, the wheel is the same bytes wherever it is built."""

from __future__ import annotations

import email
import email.message
import hashlib
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import commands
import jinja2
import pytest
import yaml
from paths import ROOT
from readme_renderer import markdown
from waiting import scaled

import hpcgpu

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
URL = "https://example.org/owner/hpcgpu"


def build(kind: str, source: Path, into: Path, **env: str) -> Path:
    """Build with hatchling, in a process of its own: it imports hatch_build.py of the source."""
    words = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(into)]
    env = {"PATH": os.environ["PATH"], "SOURCE_DATE_EPOCH": "1700000000", **env}
    subprocess.run(words, cwd=source, env=env, check=True, capture_output=True, timeout=scaled(60))
    (built,) = into.iterdir()
    return built


def metadata(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        return email.message_from_string(archive.read(name).decode())


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("sdist", ROOT, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


def test_the_sdist_is_lean(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {name.partition("/")[0] for name in names} == {
        *("hpcgpu", "jobscripts", "site_configs"),
        *("CHANGELOG.md", "CITATION.cff", "LICENSE", "README.md", "hatch_build.py", "pyproject.toml"),
        *(".gitignore", "PKG-INFO"),  # hatchling's
    }
    assert not [name for name in names if name.endswith((".pyc", ".so"))]


def test_wheels_of_checkout_and_sdist_are_the_same_bytes(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    """Other folder, other times of files, other umask."""
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    before = os.umask(0o077)
    try:
        again = build("wheel", source, tmp_path / "again")
    finally:
        os.umask(before)
    assert again.name == wheel.name
    assert hashlib.sha256(again.read_bytes()).digest() == hashlib.sha256(wheel.read_bytes()).digest()


def test_metadata_are_true(wheel: Path) -> None:
    facts = metadata(wheel)
    assert facts["License-Expression"] == "BSD-3-Clause"
    versions = {c.rpartition(" ")[2] for c in facts.get_all("Classifier", []) if "Python :: 3." in c}
    assert versions == {"3.11", "3.12", "3.13"}
    assert "Python 3.11 to 3.13." in (ROOT / "CHANGELOG.md").read_text()
    assert facts["Requires-Python"] == f">={min(versions)}"


@pytest.mark.parametrize("url", ["", URL])
def test_readme_of_a_wheel_has_no_dead_link(url: str, tmp_path: Path) -> None:
    facts = metadata(build("wheel", ROOT, tmp_path, HPCGPU_URL=url))
    html = markdown.render(str(facts.get_payload()))
    assert html
    assert "<h1" in html
    links = [part.partition('"')[0] for word in ('href="', 'src="') for part in html.split(word)[1:]]
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
    assert any(link.startswith(URL) for link in links) == bool(url)
    listed = [line.partition(", ")[2] for line in facts.get_all("Project-URL", [])]
    assert listed == (
        [URL, URL, f"{URL}/issues", *(f"{URL}/blob/HEAD/{f}" for f in ("CHANGELOG.md", "docs/index.md"))] if url else []
    )


def test_the_conda_recipe_asks_for_what_pip_asks_for() -> None:
    text = (ROOT / "packaging/conda/meta.yaml").read_text()
    recipe = yaml.safe_load(jinja2.Template(text).render(PYTHON="python"))
    assert recipe["package"]["version"] == hpcgpu.__version__
    names = {"dask": "dask-core"}  # of conda-forge
    bounds = {tuple(re.split("(?=>=)", word)) for word in PROJECT["dependencies"]}
    assert {tuple(word.split()) for word in recipe["requirements"]["run"] if ">=" in word} == {
        ("python", PROJECT["requires-python"]),
        *((names.get(name, name), bound) for name, bound in bounds),
    }
    assert recipe["build"]["entry_points"] == [f"{n} = {to}" for n, to in PROJECT["scripts"].items()]
    for command in recipe["test"]["commands"]:
        commands.check(command)


def test_the_apptainer_definition_installs_the_newest_wheel(tmp_path: Path) -> None:
    """``pip wheel -w dist`` leaves the wheels of earlier versions where they are."""
    definition = (ROOT / "packaging/apptainer/hpcgpu.def").read_text()
    sections = dict(re.findall(r"^%(\w+)\n(.*?)(?=^%|\Z)", definition, re.S | re.M))
    assert {"files", "post", "environment", "runscript", "test"} <= sections.keys()
    for line in filter(str.strip, sections["test"].split("\n")):
        commands.check(line)
    install = [line for line in sections["post"].splitlines() if "whl" in line or "pip install" in line]
    for name in ("hpcgpu-0.9.0", "hpcgpu-0.10.0", "another-2.0"):
        (tmp_path / f"{name}-py3-none-any.whl").touch()
    pip = f'pip() {{ printf "%s\\n" "$@" > {tmp_path}/typed; }}\n'
    script = pip + "\n".join(install).replace("/opt/venv/bin/pip", "pip").replace("/opt/dist", str(tmp_path))
    subprocess.run(["sh", "-eu"], input=script, text=True, check=True, timeout=scaled(30))
    newest = tmp_path / "hpcgpu-0.10.0-py3-none-any.whl"
    assert (tmp_path / "typed").read_text().splitlines()[-1] == f"{newest}[mpi-runtime,dashboard]"
