"""The rendezvous by files, in a folder that all nodes share.

The folder's name may be that of a launch that was killed, with its files. So rank 0 calls with a random word, each rank
answers that call with a random word of its own, and a rank takes only the world that has both.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hpcgpu.agent.missing_ranks import format_ranks
from hpcgpu.errors import LaunchError
from hpcgpu.host import private
from hpcgpu.model import CpuSet, RankFacts

Records = list[dict[str, Any]]
_POLL_S = 0.05
_OLD_S = 86400.0  # longer than any rendezvous; after it nobody needs its folder


def clear_old(home: Path) -> None:
    """Remove the folders that killed launches left in ``home``, where each launch has its own."""
    import shutil

    if home.is_dir():
        for folder in home.iterdir():
            if time.time() - folder.lstat().st_mtime > _OLD_S:
                shutil.rmtree(folder, ignore_errors=True)


def meet_by_files(record: Mapping[str, Any], facts: RankFacts, folder: Path, deadline_s: float) -> Records:
    """Return the records of all ranks, in rank order; raise LaunchError if one is missing after ``deadline_s``.

    Rank 0 gathers the others' files into one: three reads per rank, however many there are. ``folder`` is this
    launch's, on a file system that all ranks share; it is made with mode 0700, its files with 0600.
    """
    end_s = time.monotonic() + deadline_s

    def wait(missing: str) -> None:
        if time.monotonic() > end_s:
            raise LaunchError(
                f"not all {facts.size} ranks came to the rendezvous within {deadline_s:g} s (--death-timeout); "
                f"{missing}. They meet in {folder}: is it on a file system that all nodes share?"
            )
        time.sleep(_POLL_S)
        # Opening the folder has NFS ask the server: it remembers for 30 s that a name was not there (nfs(5)).
        os.close(os.open(folder, os.O_RDONLY | os.O_DIRECTORY))

    private.make_folder(folder)
    return (_call if facts.rank == 0 else _answer)(record, facts, folder, wait)


def _call(record: Mapping[str, Any], facts: RankFacts, folder: Path, wait: Callable[[str], None]) -> Records:
    """Call the other ranks, and write the world once each has answered; return its records."""
    call = os.urandom(16).hex()
    private.write(folder / "call", json.dumps(call))
    answers: dict[int, Any] = {0: {"record": record}}
    while absent := CpuSet(range(facts.size)) - answers.keys():
        for rank in absent:
            if (answer := _read_json(folder / f"rank-{rank}")) and answer["call"] == call:
                answers[rank] = answer
        if away := absent - answers.keys():
            wait(f"missing: {format_ranks(away)}")
    world = [answers[rank] for rank in range(facts.size)]
    private.write(folder / "world", json.dumps(world))
    return [answer["record"] for answer in world]


def _answer(record: Mapping[str, Any], facts: RankFacts, folder: Path, wait: Callable[[str], None]) -> Records:
    """Answer each call of rank 0 until a world holds this answer; return its records."""
    rank, answered = facts.rank, {"call": "", "word": os.urandom(16).hex()}
    while True:
        if (call := _read_json(folder / "call")) and call != answered["call"]:
            answered["call"] = call
            private.write(folder / f"rank-{rank}", json.dumps({**answered, "record": record}))
        world = _read_json(folder / "world") or ()
        if rank < len(world) and answered.items() <= world[rank].items():
            return [answer["record"] for answer in world]
        wait("no answer of rank 0" if answered["call"] else "missing: rank 0")


def _read_json(path: Path) -> Any:
    """Read a file that other processes replace as a whole; None if it does not exist."""
    with contextlib.suppress(FileNotFoundError):
        return json.loads(private.read(path))
    return None
