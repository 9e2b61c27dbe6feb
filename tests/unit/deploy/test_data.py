"""Files that travel with the package are found in a checkout, and in what a wheel installs."""

from __future__ import annotations

import runpy
import shutil
import tomllib
from pathlib import Path

import pytest
from paths import ROOT

from hpcgpu.deploy import sites

WHEEL = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
INCLUDED = {name: place for name, place in WHEEL["force-include"].items() if place.startswith("hpcgpu/data/")}


@pytest.mark.parametrize("name", INCLUDED)
def test_they_are_where_they_are_looked_for(name: str, tmp_path: Path) -> None:
    assert sites.package_folder(name) == ROOT / name
    module = tmp_path / "hpcgpu" / "deploy" / "sites.py"
    module.parent.mkdir(parents=True)
    shutil.copy(ROOT / "hpcgpu" / "deploy" / "sites.py", module)
    installed = tmp_path / INCLUDED[name]
    installed.mkdir(parents=True)
    assert runpy.run_path(str(module))["package_folder"](name) == installed
    assert {"site_configs", "jobscripts"} <= INCLUDED.keys()
    assert sites.folders()[1:] == (ROOT / "site_configs",)
