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


def test_a_wheel_is_the_same_bytes_from_the_checkout_and_from_the_sdist(
    sdist: Path, wheel: Path, tmp_path: Path
) -> None:
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
    found = metadata(wheel)
    assert found["License-Expression"] == "BSD-3-Clause"
    assert found["Author"] == "The hpcgpu developers"
    versions = {c.rpartition(" ")[2] for c in found.get_all("Classifier", []) if "Python :: 3." in c}
    assert versions == {"3.11", "3.12", "3.13"}
    assert "Python 3.11 to 3.13." in (ROOT / "CHANGELOG.md").read_text()
    assert found["Requires-Python"] == f">={min(versions)}"


@pytest.mark.parametrize("url", ["", URL])
def test_the_readme_is_shown_on_an_index_and_no_link_in_it_is_dead(url: str, tmp_path: Path) -> None:
    found = metadata(build("wheel", ROOT, tmp_path, HPCGPU_URL=url))
    assert found["Description-Content-Type"] == "text/markdown"
    text = str(found.get_payload())
    html = markdown.render(text)
    assert html
    assert "<h1" in html
    assert 'class="highlight"' in html or "<pre" in html
    links = [part.partition('"')[0] for word in ('href="', 'src="') for part in html.split(word)[1:]]
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
    assert any(link.startswith(URL) for link in links) == bool(url)
    listed = [line.partition(", ")[2] for line in found.get_all("Project-URL", [])]
    assert listed == (
        [URL, URL, f"{URL}/issues", *(f"{URL}/blob/HEAD/{f}" for f in ("CHANGELOG.md", "docs/index.md"))] if url else []
    )


def test_the_conda_recipe_asks_for_what_pip_asks_for() -> None:
    text = (ROOT / "packaging/conda/meta.yaml").read_text()
    recipe = yaml.safe_load(jinja2.Template(text).render(PYTHON="python"))
    assert recipe["package"]["version"] == hpcgpu.__version__
    names = {"dask": "dask-core"}  # of conda-forge
    wanted = {tuple(re.split("(?=>=)", word)) for word in PROJECT["dependencies"]}
    assert {tuple(word.split()) for word in recipe["requirements"]["run"] if ">=" in word} == {
        ("python", PROJECT["requires-python"]),
        *((names.get(name, name), bound) for name, bound in wanted),
    }
    assert recipe["build"]["entry_points"] == [f"{n} = {to}" for n, to in PROJECT["scripts"].items()]
    assert recipe["about"]["license"] == PROJECT["license"]
    for command in recipe["test"]["commands"]:
        commands.check(command)


def test_the_apptainer_definition_installs_as_the_image_of_the_demo_does() -> None:
    definition = (ROOT / "packaging/apptainer/hpcgpu.def").read_text()
    image = (ROOT / "docker/demo.Dockerfile").read_text()
    sections = dict(re.findall(r"^%(\w+)\n(.*?)(?=^%|\Z)", definition, re.S | re.M))
    assert sections.keys() == {"files", "post", "environment", "runscript", "test", "labels"}
    for pattern in (r"FROM (\S+) AS|From: (\S+)", r"no-install-recommends (.+?)(?: \\)?$", r'(\[[a-z,-]+\]")'):
        found = [{*map("".join, re.findall(pattern, text, re.M))} for text in (definition, image)]
        assert found[0] <= found[1], pattern
        assert found[0], pattern
    done = subprocess.run(["bash", "-n"], input=sections["post"], text=True, capture_output=True, timeout=scaled(30))
    assert done.returncode == 0, done.stderr
    for line in sections["test"].split("\n"):
        if line.strip():
            commands.check(line)


@pytest.mark.parametrize("wheels", [["0.1.0"], ["0.9.0", "0.10.0"]])
def test_the_apptainer_definition_takes_the_newest_of_several_wheels(wheels: list[str], tmp_path: Path) -> None:
    """``pip wheel -w dist`` leaves the wheels of earlier versions where they are."""
    definition = (ROOT / "packaging/apptainer/hpcgpu.def").read_text()
    [post] = re.findall(r"^%post\n(.*?)(?=^%)", definition, re.S | re.M)
    install = [line for line in post.splitlines() if "whl" in line or "pip install" in line]
    for version in wheels:
        (tmp_path / f"hpcgpu-{version}-py3-none-any.whl").touch()
    (tmp_path / "another-2.0-py3-none-any.whl").touch()
    said = tmp_path / "said"
    pip = f'pip() {{ printf "%s\\n" "$@" > {said}; }}\n'
    script = pip + "\n".join(install).replace("/opt/venv/bin/pip", "pip").replace("/opt/dist", str(tmp_path))
    subprocess.run(["sh", "-eu"], input=script, text=True, check=True, timeout=scaled(30))
    newest = tmp_path / f"hpcgpu-{wheels[-1]}-py3-none-any.whl"
    assert said.read_text().splitlines()[-1] == f"{newest}[mpi-runtime,dashboard]"
