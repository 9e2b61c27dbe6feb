"""The Python environment of ranks: its kind, and the folders from which it imports."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

from hpcgpu.errors import LaunchError
from hpcgpu.host import run
from hpcgpu.host.scratch import Mount, mount_of
from hpcgpu.model import Command

_FACTS = (
    "import json, sys; print(json.dumps([sys.executable, sys.prefix, sys.base_prefix, list(filter(None, sys.path))]))"
)
_QUERY_S = 120.0
_OF_THE_NODE = ("/usr", "/bin", "/lib", "/lib64")
_SITE = ("site-packages", "dist-packages")
_IMAGES = frozenset(("overlay", "squashfs", "fuse.squashfuse", "fuse.squashfuse_ll", "fuse.fuse-overlayfs"))


class Environment(NamedTuple):
    """A Python, and the folders on its path; those of the operating system, which each node has, are left out."""

    kind: str  # venv, conda, module (another Python), system (the operating system's), container (in an image)
    python: str
    prefixes: tuple[str, ...]  # copied as a whole
    early: tuple[str, ...] = ()  # further folders that come before the standard library: PYTHONPATH
    late: tuple[str, ...] = ()  # and after it: editable installs, packages of the user
    unused: tuple[str, ...] = ()  # folders of packages of the Python below a venv, which does not see them
    site: str = ""  # the folder of its packages in a prefix

    @property
    def prefix(self) -> str:
        """The folder that names it, for messages."""
        return self.prefixes[0] if self.prefixes else self.python


def kind_of(prefix: str, base: str, mount: Mount | None, *, has_conda: bool) -> str:
    """Return the kind of an environment from its folders, and from the file system on which it lies."""
    if mount and mount.kind in _IMAGES:
        return "container"
    if has_conda:
        return "conda"
    if prefix != base:
        return "venv"
    return "system" if _is_on_node(prefix, mount) else "module"


def _is_on_node(path: str, mount: Mount | None) -> bool:
    inside = any(path == folder or path.startswith(f"{folder}/") for folder in _OF_THE_NODE)
    return inside and not (mount and mount.is_network)


def read(python: str) -> Environment:
    """Return the environment of a Python, which is started once; or raise LaunchError."""
    done = run.run_sync(Command((python, "-c", _FACTS), timeout_s=_QUERY_S))
    try:
        executable, prefix, base, path = json.loads(done.stdout)
    except ValueError:
        raise LaunchError(f"{python} does not say what it is: {done.stderr.strip()[-200:]}") from None
    if os.path.realpath(python) != os.path.realpath(executable):
        raise LaunchError(f"{python} is no Python, but starts {executable}: its environment is not known")
    mounts = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")

    def mount(folder: str) -> Mount | None:
        return mount_of(os.path.realpath(folder), mounts)

    kind = kind_of(prefix, base, mount(prefix), has_conda=os.path.isdir(f"{prefix}/conda-meta"))
    prefixes = tuple(p for p in dict.fromkeys((prefix, base)) if not _is_on_node(p, mount(p)))
    inside = tuple(f"{p}/" for p in prefixes)
    others = [f for f in path if os.path.isdir(f) and not f.startswith(inside) and not _is_on_node(f, mount(f))]
    library = next((at for at, f in enumerate(path) if os.path.isfile(f"{f}/os.py")), len(path))
    version = next((f for f in path[library : library + 1]), "")
    return Environment(
        kind=kind,
        python=executable,
        prefixes=prefixes,
        early=tuple(f for f in others if path.index(f) < library),
        late=tuple(f for f in others if path.index(f) > library),
        unused=tuple(f for name in _SITE if (f := f"{version}/{name}") not in path),
        site=next((f for f in path if f.startswith(inside) and f.endswith(_SITE)), ""),
    )


def is_site(folder: str) -> bool:
    """Return whether a folder holds packages alone, as pip installs them."""
    return os.path.basename(folder) in _SITE


def editable(environment: Environment) -> tuple[str, ...]:
    """Return setuptools' finders of editable installs, whose modules are on no path: they stay where they are."""
    return tuple(sorted(path.stem for path in Path(environment.site or os.devnull).glob("__editable__*_finder.py")))
