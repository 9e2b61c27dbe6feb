"""Wheels for a machine with a GPU and without a package index: fetched here, carried, and unpacked there.

Imports the standard library alone; to choose among the wheels also ``packaging``, if need be out of its wheel.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from email.parser import HeaderParser
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
MOST_WHEEL_BYTES = 64 * 2**20
# Carried unless others are named: RMM's tests and measurements need it (6 MiB), and dask-cuda stands beside hpcgpu.
CARRIED = ("rmm-cu13", "dask-cuda")
# Without what they require, which the other machine has: with it pip takes a dask-cuda of 2024, numba and llvmlite (89
# MiB on 2026-11-28).
ALONE = ("dask-cuda",)
# Not carried unless it is named: the other machine's NumPy is the one for which its CuPy was built.
LEFT_OUT = "numpy"
# pip matches a platform's glibc exactly: the usual ones of wheels, newest first
GLIBCS = (*(f"2_{n}" for n in (35, 34, 31, 28, 27, 24, 17, 12, 5)), "2014", "2010", "1")


class Wheel(NamedTuple):
    """A wheel that was carried: its file, name, version and what it requires."""

    path: Path
    name: str
    version: str
    requires: tuple[str, ...]


def normal(name: str) -> str:
    """Return a package's name as all spellings of it have it."""
    return name.lower().replace("_", "-").replace(".", "-")


def read_wheel(path: Path) -> Wheel:
    """Read what a wheel says of itself."""
    with zipfile.ZipFile(path) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        said = HeaderParser().parsestr(archive.read(name).decode())
    return Wheel(path, normal(said["Name"]), said["Version"], tuple(said.get_all("Requires-Dist", ())))


def requirements() -> list[str]:
    """Return what hpcgpu and its tests on a GPU require."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    tests = ("hypothesis", "pytest", "pytest-timeout")
    extra = project["optional-dependencies"]["dev"]
    return [*project["dependencies"], *(r for r in extra if r.partition(">")[0] in tests)]


def lacking(wheels: Sequence[Wheel], required: Iterable[str], there: Mapping[str, str]) -> list[Wheel]:
    """Return the wheels to unpack: of what is required, by them too, and not there in such a version.

    What the machine has stays: its NumPy is the one for which its CuPy was built.
    """
    carried, taken = {wheel.name: wheel for wheel in wheels}, {}
    if "packaging" in carried:
        sys.path.append(str(carried["packaging"].path))  # a wheel of Python alone can be imported from
    from packaging.requirements import Requirement

    open_ = list(required)
    while open_:
        wanted = Requirement(open_.pop())
        wheel = carried.get(normal(wanted.name))
        if wheel is None or wheel.name in taken or (wanted.marker and not wanted.marker.evaluate({"extra": ""})):
            continue
        version = there.get(wheel.name)
        if version is None or not wanted.specifier.contains(version, prereleases=True):
            taken[wheel.name] = wheel
            open_ += wheel.requires
    return list(taken.values())


def unpack(folder: Path, site: Path) -> None:
    """Unpack the wheels that this Python lacks, without an index; what was unpacked before goes."""
    shutil.rmtree(site, ignore_errors=True)
    there = {normal(d.metadata["Name"]): d.version for d in metadata.distributions() if d.metadata["Name"]}
    wheels = [read_wheel(path) for path in sorted(folder.glob("*.whl"))]
    # what was named to be carried along is wanted as it is
    wanted = [*requirements(), *((folder / "named").read_text().split("\n") if (folder / "named").exists() else ())]
    chosen = lacking(wheels, filter(None, wanted), there)
    if chosen:
        pip = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-index",
            "--no-deps",
            "--no-compile",
            "--root-user-action=ignore",
        ]
        done = subprocess.run([*pip, "--target", str(site), *(str(wheel.path) for wheel in chosen)], timeout=120)
        if done.returncode:
            version = ".".join(platform.python_version_tuple()[:2])
            sys.exit(
                f"pip could not unpack {folder.name} (its words are above); this is Python {version}. For it: "
                f"scripts/gpu.sh wheels --python {version}"
            )
    names = ", ".join(sorted(wheel.name for wheel in chosen))
    print(f"{len(chosen)} of {len(wheels)} wheels are unpacked{': ' if names else ''}{names}", flush=True)


def fetch(folder: Path, python: str, named: Sequence[str], most_bytes: int = MOST_WHEEL_BYTES) -> int:
    """Fetch wheels for another machine's Python, and see that they can be carried."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    platforms = [f"--platform=manylinux{'_' if '_' in glibc else ''}{glibc}_{platform.machine()}" for glibc in GLIBCS]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--only-binary=:all:"]
    # what is tested here, but for CUDA's own packages: the other machine's driver decides
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("cuda-")]
    (folder / "constraints").write_text("\n".join(pins))
    where = ["--implementation=cp", f"--python-version={python}", *platforms, "-c", str(folder / "constraints")]
    alone = [name for name in named if normal(name).startswith(ALONE)]
    wanted = [*requirements(), *(name for name in named if name not in alone)]
    codes = [subprocess.run([*pip, *where, "-d", str(folder), *wanted], timeout=600).returncode]
    if alone:
        at = where[: where.index("-c")]
        codes.append(subprocess.run([*pip, "--no-deps", *at, "-d", str(folder), *alone], timeout=600).returncode)
    if any(codes):
        print("pip could not fetch the wheels (its words are above)", file=sys.stderr)
        return 1
    (folder / "named").write_text("\n".join(named))
    if not any(normal(name).startswith(LEFT_OUT) for name in named):
        for path in folder.glob(f"{LEFT_OUT}-*.whl"):
            path.unlink()
    sizes = {path.name: path.stat().st_size for path in folder.glob("*.whl")}
    total = sum(sizes.values())
    print(f"{folder.name}: {len(sizes)} wheels for Python {python}, {total / 2**20:.1f} MiB")
    if total <= most_bytes:
        return 0
    biggest = sorted(sizes, key=lambda name: -sizes[name])[:3]
    print(f"{most_bytes / 2**20:.0f} MiB can be carried; the biggest: {', '.join(biggest)}", file=sys.stderr)
    return 1
