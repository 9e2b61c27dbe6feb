"""The command about checkpoints: what a folder has, whether it is whole, and to remove a name."""

from __future__ import annotations

import stat
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpcgpu.cli.command import command, json_option, show_text
from hpcgpu.errors import ConfigError
from hpcgpu.report.table import Column, Table
from hpcgpu.units import format_duration

if TYPE_CHECKING:
    from hpcgpu.checkpoint.folder import Folder

_COLUMNS = (
    *(Column("name", kind="name"), Column("kind", kind="name"), Column("chunks")),
    *(Column("size", unit="B", kind="number"), Column("age", kind="name"), Column("python", kind="name")),
)


@command(
    short_help="Show what is in a checkpoint's folder.",
    examples={
        "hpcgpu checkpoint /scratch/me/run1": "names, chunks, owner",
        "hpcgpu checkpoint /scratch/me/run1 --verify": "read all chunks",
        "hpcgpu checkpoint /scratch/me/run1 --remove x": "",
    },
)
@click.argument("folder", type=click.Path(resolve_path=True, readable=False))
@click.option("--verify", is_flag=True, help="Read all chunks; exit code 1 if one is damaged.")
@click.option("--remove", "name", metavar="NAME", help="Forget NAME, and remove files without chunks of other names.")
@click.option("--trust-folder", is_flag=True, help="Accept a folder that other users own or can change.")
@json_option("names, owner and damage")
def checkpoint(folder: str, verify: bool, name: str | None, trust_folder: bool, as_json: bool) -> int:
    """Show the names in the checkpoint FOLDER, how many of their chunks are there, and which process may write."""
    from hpcgpu.checkpoint.folder import Folder, poll
    from hpcgpu.host import private

    if not stat.S_ISDIR(private.mode_of(Path(folder))):
        raise ConfigError(f"there is no folder {folder}")
    opened = Folder(Path(folder), trusted=trust_folder)
    if name is not None:
        opened.require(name)  # before anything is written: it may be no checkpoint's folder
        opened.take(poll)
        try:
            opened.remove(name)
        finally:
            opened.release()
    if verify:
        opened.index.check()
    rows, holder = _rows(opened), opened.holder
    state = f"written by {holder}, {holder.state(poll)}" if holder else "no process writes here"
    damaged = _damaged(opened) if verify else []
    empty = [] if rows else [f"{folder} has no name: no collection was persisted there"]
    notes = [*empty, state, *damaged, *(["all chunks that are there are whole"] if verify and not damaged else [])]
    shown = [
        (r["name"], r["kind"], f"{r['done']} of {r['count']}", r["nbytes"], format_duration(r["age_s"]), r["python"])
        for r in rows
    ]
    text = Table(_COLUMNS, shown, notes=notes)
    show_text(text, {"names": rows, "owner": state, "damaged": damaged} if as_json else None)
    return int(bool(damaged))


def _rows(folder: Folder) -> list[dict[str, Any]]:
    from hpcgpu.checkpoint.progress import progress_of

    return [
        asdict(row) | {"age_s": int((datetime.now(UTC) - manifest.created).total_seconds()), "python": manifest.python}
        for row in progress_of(folder, every=True)
        if (manifest := folder.manifest(row.name))
    ]


def _damaged(folder: Folder) -> list[str]:
    """Return a line for each chunk that is not as it was written, and for each file with bytes that are no record."""
    from hpcgpu.checkpoint.segments import is_whole

    names = {manifest.run: name for name in folder.names if (manifest := folder.manifest(name))}
    lines = [f"{segment} is damaged at byte {offset}" for segment, offset in folder.index.damage.items()]
    return lines + [
        f"{names[chunk.run]}, part {list(chunk.part)} in {place.segment} is damaged"
        for chunk, place in sorted(folder.index.chunks.items(), key=lambda item: item[1])
        if chunk.run in names and not is_whole(folder.path, chunk, place)
    ]
