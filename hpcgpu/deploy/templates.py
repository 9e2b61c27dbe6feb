"""Job templates: the files of ``jobscripts``. The first two comments of each are its purpose and its usage."""

from __future__ import annotations

from pathlib import Path

from hpcgpu.deploy import sites
from hpcgpu.errors import ConfigError


def folder() -> Path:
    """Return the folder of the templates and of the programs that they start."""
    return sites.package_folder("jobscripts")


def names() -> list[str]:
    """Return the names of all templates: Slurm, PBS, none; the shortest template of each first."""
    systems = ("slurm", "pbs", "mpirun")
    files = [p.name for p in folder().iterdir() if p.suffix in (".sbatch", ".sh")]
    return sorted(files, key=lambda name: (systems.index(name.partition(".")[0].partition("-")[0]), "-" in name, name))


def text_of(name: str) -> str:
    """Return the text of a template; raise ConfigError for another name."""
    if name not in names():
        raise ConfigError(f"there is no template {name!r}; there are: {', '.join(names())}")
    return (folder() / name).read_text()


def purpose_and_usage(name: str) -> tuple[str, str]:
    """Return what a template is for, and how it is submitted."""
    purpose, usage = [line[2:] for line in text_of(name).splitlines() if line.startswith("# ")][:2]
    return purpose, usage.removeprefix("usage: ")
