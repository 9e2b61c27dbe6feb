"""Site files: the machines that travel with the package, and what is said about a wrong file."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from paths import ROOT

from hpcgpu.config.layers import chosen_site, read_settings
from hpcgpu.config.site import DIALECTS, read_site
from hpcgpu.deploy.jobs.job_plan import job_script
from hpcgpu.errors import ConfigError
from hpcgpu.host import sites
from hpcgpu.model import Site

OURS = sorted(path.stem for path in (ROOT / "site_configs").glob("*.yaml"))
LEAST = "version: 1\nname: x\nbatch: slurm\n"


@pytest.fixture(autouse=True)
def no_files_of_this_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


def load(name: str) -> Site:
    found = sites.find_site(name)
    return read_site(found.text, found.name)


def test_three_machines() -> None:
    assert sorted(sites.known_sites()) == OURS
    perlmutter, vista, polaris = load("perlmutter"), load("vista"), load("polaris")
    assert (perlmutter.batch, perlmutter.dialect["gpus"], perlmutter.gpus_per_node) == ("slurm", "gpus-per-node", 4)
    assert (vista.batch, vista.dialect["gpus"], vista.dialect["memory"]) == ("slurm", "none", False)
    assert (polaris.batch, polaris.dialect["launcher"], polaris.required) == (
        "pbs",
        ("mpiexec",),
        ("account", "walltime"),
    )


@pytest.mark.parametrize("name", OURS)
def test_a_site_is_named_as_its_file_and_gives_settings(name: str) -> None:
    site = load(name)
    assert site.name == name
    settings = read_settings({"account": "a", "walltime": "1h"}, site=site)
    assert settings.gpus_per_node == site.gpus_per_node
    assert all(settings.where(key) == f"site {name}" for key in site.defaults)


@pytest.mark.parametrize("name", OURS)
def test_a_site_has_a_job_script(name: str) -> None:
    site = load(name)
    required = {"account": "a", "walltime": "1h", "gpus_per_node": site.gpus_per_node or 1}
    script = job_script({"site": name, **required}, "keyword {name}", (), None)
    assert all(directive in script for directive in site.defaults.get("job_extra_directives", ()))


def test_the_users_own_folder_comes_first(tmp_path: Path) -> None:
    own = tmp_path / "hpcgpu" / "sites"
    own.mkdir(parents=True)
    (own / "vista.yaml").write_text("version: 1\nname: mine\nbatch: slurm\n")
    (own / "lab.yaml").write_text("version: 1\nname: lab\nbatch: slurm\n")
    assert load("vista").name == "mine"
    assert load("lab").name == "lab"
    with pytest.raises(ConfigError, match=f"no site 'vist'; there are: {', '.join(sorted([*OURS, 'lab']))}"):
        sites.find_site("vist")


def test_a_path(tmp_path: Path) -> None:
    path = tmp_path / "lab.yaml"
    path.write_text(LEAST)
    assert load(str(path)) == Site(name="x", batch="slurm")
    with pytest.raises(ConfigError, match="cannot be read"):
        sites.find_site(str(tmp_path / "none.yaml"))
    path.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="cannot be read"):
        sites.find_site(str(path))


def test_by_environment() -> None:
    name = chosen_site({}, environ={"HPCGPU_SITE": "vista"})
    assert name is not None
    assert load(name).gpus_per_node == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "a mapping with at least version, name and batch"),
        ("- a", "a mapping"),
        ("a: [", "not YAML"),
        ("a: 1\na: 2", "'a' is given twice"),
        ("name: x", "version: None is given; this hpcgpu reads version 1"),
        (LEAST.replace("1", "2"), "version: 2 is given"),
        ("version: 1\nname: x\n", "`batch`"),
        (LEAST.replace("slurm", "lsf"), "batch: Invalid enum value 'lsf'; allowed: slurm, pbs"),
        (LEAST.replace(": x", ": A B"), "name: "),
        (LEAST + "default: {}", "default: no such key; did you mean 'defaults'?"),
        (LEAST + "dialect: {gpu: none}", "dialect.gpu: no such key; did you mean 'gpus'?"),
        (LEAST + "dialect: {gpus: ngpus}", "'ngpus'; allowed: gpus-per-node, gres, none"),
        (LEAST + "dialect: {memory: 'no way'}", "dialect.memory: "),
        (LEAST + "dialect: {mpiprocs: true}", "dialect.mpiprocs: no such key"),
        (LEAST.replace("slurm", "pbs") + "dialect: {launcher: mpiexec}", "dialect.launcher: "),
        (LEAST.replace("slurm", "pbs") + "dialect: {launcher: [mpiexec, 1]}", "dialect.launcher[1]: "),
        (LEAST.replace("slurm", "pbs") + 'dialect: {resources: "a\\nb"}', "dialect.resources: "),
        (LEAST + "defaults: {nodes: 0}", "set by sites/x.yaml: defaults.nodes"),
        (LEAST + "defaults: {nods: 1}", "sites/x.yaml: defaults.nods: did you mean 'nodes'?"),
        (LEAST + "defaults: {site: other}", "'site' is no setting that a site can have"),
        (LEAST + "required: [acount]", "did you mean 'account'?"),
        (LEAST + "gpus_per_node: 0", "gpus_per_node: "),
        (LEAST + "notes: text", "notes: "),
        (LEAST + "1: 2", "1: no such key"),
    ],
)
def test_a_wrong_file_is_named_with_the_path_to_the_value(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_site(text, "sites/x.yaml")
    assert "sites/x.yaml" in str(caught.value)
    assert said in str(caught.value)


def test_the_readme_names_every_key() -> None:
    text = (ROOT / "site_configs" / "README.md").read_text()
    keys = {f"`dialect.{key}`" for kind in DIALECTS.values() for key in kind.__struct_fields__}
    keys |= {f"`{key}`" for key in ("version", "name", "batch", "defaults", "required", "gpus_per_node", "notes")}
    assert not [key for key in sorted(keys) if key not in text]


def test_the_example_of_the_readme_is_a_site() -> None:
    text = (ROOT / "site_configs" / "README.md").read_text()
    example = text.partition("```yaml\n")[2].partition("```")[0]
    assert read_site(example, "README").name == "mymachine"


def test_the_wheel_has_the_sites_where_they_are_looked_for() -> None:
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert ROOT / wheel["force-include"]["site_configs"] in sites.folders()
    assert ROOT / "site_configs" in sites.folders()
