"""Archives of Python environments: one for each content, in a private folder of the user that all nodes share."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import stat
import subprocess
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

from hpcgpu.errors import HpcGpuError, LaunchError
from hpcgpu.host import private, run_paths
from hpcgpu.host.environment import Environment, is_site
from hpcgpu.units import format_bytes

STAGE = "@HPCGPU_STAGE@"  # in the files of an archive: the folder in which it will be unpacked
_FORMAT = 1  # of this module's archives: those of another number are made again
_RELOCATED = ".relocate"  # the list of the files with STAGE
_PATHS = "00-hpcgpu-stage.pth"  # before the files of editable installs, in alphabetical order
_MOST_BYTES = 20 << 30
_UNUSED_S = 30 * 86400
# At the top of conda's base environment: its other environments, and its downloads.
_NOT_IMPORTED = ("envs", "pkgs", "include")
_IMPORTED = (".py", ".so", ".libs", ".dist-info", ".egg-info")


class Archive(NamedTuple):
    """A checked archive."""

    path: Path
    sha256: str
    nbytes: int  # the room that it and its files need on a node


class _Entry(NamedTuple):
    path: str
    mode: int
    nbytes: int
    changed_ns: int
    link: str

    def __str__(self) -> str:
        """Return what tells it from a changed one."""
        return f"{self.path}\0{self.mode:o}\0{self.nbytes}\0{self.changed_ns}\0{self.link}\n"


def archive_of(environment: Environment) -> Archive:
    """Return the archive of an environment's present content, which is made unless it exists; or LaunchError."""
    try:
        folder = private.make_folder(private.user_folder("environments"))
        entries = list(_entries(environment))
        nbytes = sum(entry.nbytes for entry in entries)
        if nbytes > _MOST_BYTES:
            raise LaunchError(
                f"{environment.prefix} has {format_bytes(nbytes)}, and at most {format_bytes(_MOST_BYTES)} are copied"
            )
        content = hashlib.sha256(f"{_FORMAT}\0{environment}".encode(errors="surrogateescape"))
        which = content.hexdigest()[:12]
        for entry in entries:
            content.update(str(entry).encode(errors="surrogateescape"))
        zstd = shutil.which("zstd")
        path = folder / f"{which}-{content.hexdigest()[:16]}.tar{'.zst' if zstd else ''}"
        with private.locked(folder):  # jobs begin together
            _remove_old(folder, which, path.name)
            if made := _checked(path):
                os.utime(path)
                return made
            _make(path, environment, entries, zstd)
            made = Archive(path, _digest(path), nbytes * 21 // 20 + path.stat().st_size)  # a file takes whole blocks
            private.write(_facts(path), json.dumps({"sha256": made.sha256, "nbytes": made.nbytes}))
            return made
    except OSError as e:
        raise LaunchError(f"no archive of {environment.prefix} could be made: {e}") from e


def _remove_old(folder: Path, which: str, name: str) -> None:
    """Remove an environment's archives of earlier contents, half-written ones, and what no job has used for long."""
    for path in folder.glob("*.tar*"):
        is_other = which in path.name and not path.name.startswith(name)
        if is_other or time.time() - path.stat().st_mtime > _UNUSED_S:
            path.unlink()


def _facts(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")


def _checked(path: Path) -> Archive | None:
    """Return an archive that is there, is this user's alone, and is as it was made."""
    with contextlib.suppress(OSError, HpcGpuError, ValueError, TypeError):
        archive = Archive(path, **json.loads(private.read(_facts(path))))
        facts = path.lstat()
        if stat.S_ISREG(facts.st_mode) and facts.st_uid == os.getuid() and not facts.st_mode & 0o077:
            return archive if _digest(path) == archive.sha256 else None
    return None


def _digest(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _entries(environment: Environment) -> Iterator[_Entry]:
    """Yield the files, folders and links of an environment, each once, in a fixed order."""
    skipped = {f"{prefix}/{name}" for prefix in environment.prefixes for name in _NOT_IMPORTED} | {*environment.unused}
    skipped |= {f"{os.path.dirname(folder)}/test" for folder in environment.unused}
    seen = set(skipped)
    for root in (*environment.prefixes, *environment.early, *environment.late):
        is_whole = root in environment.prefixes or is_site(root)
        stack = [root]
        while stack:
            with os.scandir(folder := stack.pop()) as listed:
                entries = sorted(listed, key=lambda entry: entry.name)
            for entry in entries:
                if (
                    entry.path in seen
                    or entry.name.endswith(".a")
                    or not (is_whole or folder != root or _is_imported(entry))
                ):
                    continue
                seen.add(entry.path)
                facts = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(facts.st_mode):
                    stack.append(entry.path)
                    yield _Entry(entry.path, stat.S_IFDIR, 0, 0, "")
                elif stat.S_ISLNK(facts.st_mode):
                    yield _Entry(entry.path, stat.S_IFLNK, 0, 0, os.readlink(entry.path))
                elif stat.S_ISREG(facts.st_mode):
                    yield _Entry(entry.path, facts.st_mode, facts.st_size, facts.st_mtime_ns, "")


def _is_imported(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry of a folder on the path is a module or package, not other files of a project."""
    return entry.name.endswith(_IMPORTED) or os.path.isfile(f"{entry.path}/__init__.py")


def _make(path: Path, environment: Environment, entries: list[_Entry], zstd: str | None) -> None:
    """Write an archive; no half-written one has its name."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with private.open_new(part) as file:
            if zstd:
                with subprocess.Popen((zstd, "-q", "-1", "-T0", "-c"), stdin=subprocess.PIPE, stdout=file) as packer:
                    assert packer.stdin
                    with packer.stdin as into:
                        _write(into, environment, entries)
                if packer.returncode:
                    raise LaunchError(f"zstd could not write {path}: exit code {packer.returncode}")
            else:
                _write(file, environment, entries)
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _write(file: IO[bytes], environment: Environment, entries: list[_Entry]) -> None:
    roots = (*environment.prefixes, *environment.early, *environment.late)
    relocated = {}
    with tarfile.open(fileobj=file, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        for entry in entries:
            info = tarfile.TarInfo(entry.path.lstrip("/"))
            if stat.S_ISDIR(entry.mode):
                info.type, info.mode = tarfile.DIRTYPE, 0o755
                tar.addfile(info)
            elif stat.S_ISLNK(entry.mode):
                info.type, info.linkname = tarfile.SYMTYPE, _target(entry, roots)
                tar.addfile(info)
            elif entry.path in (f"{prefix}/pyvenv.cfg" for prefix in environment.prefixes):
                relocated[entry.path] = _relocated_venv(Path(entry.path).read_text(), roots)
            else:
                data = run_paths.relocated(Path(entry.path).read_bytes(), entry.path, roots)
                # Python takes bytecode for stale if the source has another time
                info.mtime, info.mode = entry.changed_ns // 10**9, 0o755 if entry.mode & 0o100 else 0o644
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
        if environment.site:
            lines = [f"{STAGE}{folder}" for folder in environment.late] + [*environment.early]
            relocated[f"{environment.site}/{_PATHS}"] = "".join(f"{line}\n" for line in lines)
        listed = {f"/{_RELOCATED}": "".join(f"{path}\n" for path in relocated)}
        for path, text in {**relocated, **listed}.items():
            info = tarfile.TarInfo(path.lstrip("/"))
            info.size = len(data := text.encode(errors="surrogateescape"))
            tar.addfile(info, io.BytesIO(data))


def _target(entry: _Entry, roots: tuple[str, ...]) -> str:
    """Return where a link leads in the copy: within it if that file is copied, too, else to the original."""
    folder = os.path.dirname(entry.path)
    target = os.path.normpath(os.path.join(folder, entry.link))
    inside = any(target == root or target.startswith(f"{root}/") for root in roots)
    return os.path.relpath(target, folder) if inside else target


def _relocated_venv(text: str, roots: tuple[str, ...]) -> str:
    """Return a pyvenv.cfg whose Python is the copy, if that is copied."""
    lines = []
    for line in text.splitlines():
        name, equals, value = (part.strip() for part in line.partition("="))
        if name.lower() == "home" and equals and value.startswith(tuple(f"{root}/" for root in roots)):
            line = f"home = {STAGE}{value}"
        lines.append(f"{line}\n")
    return "".join(lines)
