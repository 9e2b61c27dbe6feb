"""Build the recipe of packaging/conda where conda-forge is out of reach, install it, and run a command in it.

The dependencies come from a channel in a folder, made here of wheels: each distribution of an environment becomes a
conda package that asks for what its wheel asks for; the package python is a venv of this machine's Python. All else is
real: rattler-build solves for the recipe, builds it and runs its tests, and rattler solves for it and installs it.

usage: python conda_channel.py ENVIRONMENT RECIPE FOLDER COMMAND [ARGUMENT ...]
It needs packaging, py-rattler and py-rattler-build.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import rattler
import rattler_build
from packaging.requirements import Requirement

PLATFORM = "linux-64"
PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
NAMES = {"dask": "dask-core"}  # conda-forge's dask is a bundle
MORE = {"mpi4py": ["openmpi"]}  # conda-forge's mpi4py brings an MPI, its wheel does not


def conda_name(name: str) -> str:
    """Return the name of a distribution's conda package."""
    plain = re.sub(r"[-_.]+", "-", name).lower()
    return NAMES.get(plain, plain)


def asked_for(distribution: metadata.Distribution) -> list[str]:
    """Return what a distribution asks for, in conda's form."""
    specs = [f"python {PYTHON.removeprefix('python')}.*", *MORE.get(distribution.name, [])]
    for requirement in map(Requirement, distribution.requires or ()):
        if not requirement.marker or requirement.marker.evaluate({"extra": ""}):
            specs.append(f"{conda_name(requirement.name)} {requirement.specifier}".strip())
    return specs


def write_python(staged: Path) -> None:
    """Write a venv of this machine's Python: its packages are those of the conda environment."""
    base = Path(sys.executable).resolve()
    (staged / "bin").mkdir(parents=True)
    shutil.copy(base, staged / "bin" / PYTHON)
    for name in ("python", "python3"):
        (staged / "bin" / name).symlink_to(PYTHON)
    pip = staged / "bin" / "pip"  # rattler-build's tests call pip check
    pip.write_text('#!/bin/sh\nexec "${0%/*}/python" -m pip "$@"\n')
    pip.chmod(0o755)
    (staged / "pyvenv.cfg").write_text(f"home = {base.parent}\n")


def write_files(distribution: metadata.Distribution, environment: Path, staged: Path) -> None:
    """Copy a distribution's files, but no scripts: their first line names the environment that they are from."""
    for file in distribution.files or ():
        source = Path(str(distribution.locate_file(file))).resolve()
        is_script = source.parent.name == "bin" and source.read_bytes()[:2] == b"#!"
        if file.suffix != ".pyc" and not is_script:
            place = staged / source.relative_to(environment)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, place)


def make_channel(environment: Path, folder: Path) -> list[metadata.Distribution]:
    """Write the channel of an environment's distributions, and return them."""
    (folder / PLATFORM).mkdir(parents=True)
    staged = folder / "staged"

    def pack(name: str, version: str, depends: list[str]) -> None:
        parts = (name, version, PLATFORM, "0", folder / PLATFORM)
        rattler_build.assemble_package(*parts, files_dir=staged, depends=depends, compression_level=1)
        shutil.rmtree(staged)

    write_python(staged)
    pack("python", ".".join(map(str, sys.version_info[:3])), [])
    packages = str(environment / "lib" / PYTHON / "site-packages")
    distributions = [d for d in metadata.distributions(path=[packages]) if d.name != "hpcgpu"]
    for distribution in distributions:
        write_files(distribution, environment, staged)
        pack(conda_name(distribution.name), distribution.version, asked_for(distribution))
    asyncio.run(rattler.index.index_fs(folder))
    return distributions


async def install(channel: str, prefix: Path) -> int:
    """Let rattler solve for hpcgpu, and install it; return the number of packages."""
    records = await rattler.solve([channel], ["hpcgpu"], virtual_packages=rattler.VirtualPackage.detect())
    await rattler.install(records, prefix, show_progress=False)
    return len(records)


def main(environment: Path, recipe: Path, folder: Path, *command: str) -> int:
    """Do all of it; the first line is the environment's size, the last one the result."""
    channel, prefix = folder / "channel", folder / "prefix"
    number = len(make_channel(environment, channel))
    options = {"tool_config": rattler_build.ToolConfiguration(test_strategy="native"), "channels": [channel.as_uri()]}
    (built,) = rattler_build.Stage0Recipe.from_file(recipe).run_build(output_dir=channel, **options)
    installed = asyncio.run(install(channel.as_uri(), prefix))
    env = {**os.environ, "PATH": f"{prefix}/bin:/usr/bin:/bin", "CONDA_PREFIX": str(prefix)}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True)
    print(sum(f.stat().st_size for f in prefix.rglob("*") if f.is_file()) // 10**6, "MB")
    print(f"{Path(built.packages[0]).name} built on a channel of {number} wheels, and its tests passed;", end=" ")
    print(f"installed with {installed - 1} packages of it: {done.stdout.strip().rpartition(chr(10))[2]}")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(*(Path(path).resolve() for path in sys.argv[1:4]), *sys.argv[4:]))
