"""The rendezvous by files, in a folder that all nodes share.

The folder's name may be that of a launch that was killed, with its files. So rank 0 calls with a random word, each rank
answers that call with a random word of its own, and a rank takes only the world that has both.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hpcgpu.agent.missing_ranks import format_ranks
from hpcgpu.errors import LaunchError
from hpcgpu.host import private
from hpcgpu.model import CpuSet, RankFacts

Records = list[dict[str, Any]]
Wait = Callable[[str], None]  # called with what is missing
# Between two looks at a folder, at first and in the end: a thousand ranks may share its file system. What grows does so
# by up to half as much again, so that they do not look together.
_SHORTEST_S, _LONGEST_S, _GROWTH, _JITTER = 0.05, 1.0, 1.5, 1.5
# Of a rank that expects the answer of rank 0, and of rank 0, for which all others wait.
_SOON_S, _RANK_0_S = 0.2, 0.1
# The last one of the ranks that wait for rank 0 sees its call after _LONGEST_S.
_EXPECT_S = 2.0
# A change may have the time stamp of the one before it: some file systems count seconds, others a clock's ticks.
_STAMP_S, _TICK_S = 2.0, 0.1
# Longer than any rendezvous; after it nobody needs its folder.
_OLD_S = 86400.0


def clear_old(home: Path) -> None:
    """Remove the folders that killed launches left in ``home``, where each launch has its own."""
    import shutil

    for folder in private.files_in(home):
        if time.time() - folder.lstat().st_mtime > _OLD_S:
            shutil.rmtree(folder, ignore_errors=True)


def meet_by_files(record: Mapping[str, Any], facts: RankFacts, folder: Path, deadline_s: float) -> Records:
    """Return the records of all ranks, in rank order; raise LaunchError if one is missing after ``deadline_s``.

    ``folder`` is this launch's, on a file system that all ranks share; it is made with mode 0700, its files with 0600.
    While a rank waits it opens one folder, soon once a second. Rank 0 alone writes into ``folder``, the others into one
    below it, whose files rank 0 reads once each and gathers into the world.
    """
    end_s = time.monotonic() + deadline_s
    private.make_folder(folder)
    if facts.rank == 0:
        private.make_folder(folder / "answers")
        watched = _WatchedFolder(folder / "answers", _RANK_0_S)
    else:
        watched = _WatchedFolder(folder, _LONGEST_S)

    def wait(missing: str) -> None:
        if time.monotonic() > end_s:
            raise LaunchError(
                f"not all {facts.size} ranks came to the rendezvous within {deadline_s:g} s (--death-timeout); "
                f"{missing}. They meet in {folder}: is it on a file system that all nodes share?"
            )
        watched.wait(end_s)

    if facts.rank == 0:
        return _call(record, facts, folder, wait)
    return _answer(record, facts, folder, wait, watched.look_soon)


class _WatchedFolder:
    """A folder and the interval between two looks at it, which grows."""

    def __init__(self, path: Path, longest_s: float) -> None:
        self._path, self._longest_s, self._interval_s = path, longest_s, _SHORTEST_S
        self._stamp, self._changed_s, self._expected_s, self._settled = 0, 0.0, 0.0, False

    def look_soon(self) -> None:
        """Shorten the interval for a while: a change is expected."""
        self._interval_s, self._expected_s = min(self._interval_s, _SOON_S), time.monotonic() + _EXPECT_S

    def wait(self, end_s: float) -> None:
        """Return after an interval if the folder may have changed, at the latest at ``end_s``."""
        while (now_s := time.monotonic()) < end_s:
            pause_s = min(self._interval_s * random.uniform(1.0, _JITTER), self._longest_s)
            time.sleep(min(pause_s, end_s - now_s))
            if now_s > self._expected_s:
                self._interval_s = min(self._interval_s * _GROWTH, self._longest_s)
            # To open the folder has NFS ask the server: it remembers for 30 s that a name was not there (nfs(5)).
            descriptor = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY)
            stamp = os.fstat(descriptor).st_mtime_ns
            os.close(descriptor)
            if stamp != self._stamp:
                self._stamp, self._changed_s, self._settled = stamp, time.monotonic(), False
            if not self._settled:  # the last time when no other change has this stamp, however late that is
                same_s = _TICK_S if stamp % 1_000_000_000 else _STAMP_S
                self._settled = time.monotonic() >= self._changed_s + same_s
                return


def _call(record: Mapping[str, Any], facts: RankFacts, folder: Path, wait: Wait) -> Records:
    """Call the other ranks, and write the world once each has answered; return its records."""
    call = os.urandom(16).hex()
    _write_json(folder / "call", call)
    answers: dict[int, Any] = {0: {"record": record}}
    while absent := CpuSet(range(facts.size)) - answers.keys():
        for name in os.listdir(folder / "answers"):
            of, _, rank = name.partition("-")
            if of == call and rank.isdigit() and int(rank) in absent:
                answers[int(rank)] = json.loads(private.read(folder / "answers" / name))
        if away := absent - answers.keys():
            wait(f"missing: {format_ranks(away)}")
    # All ranks read it: a record that several have, as those of a node do beside their numbers, is in it once.
    kinds: dict[str, int] = {}
    ordered = [answers[rank] for rank in range(facts.size)]
    kind_of = [kinds.setdefault(json.dumps({**each["record"], "rank": None}), len(kinds)) for each in ordered]
    tokens = [each.get("word") for each in ordered]
    world = {"tokens": tokens, "of": kind_of, "kinds": [*map(json.loads, kinds)]}
    _write_json(folder / f"world-{call}", world)
    return [each["record"] for each in ordered]


def _answer(record: Mapping[str, Any], facts: RankFacts, folder: Path, wait: Wait, soon: Callable[[], None]) -> Records:
    """Answer each call of rank 0 until a world holds this answer; return its records."""
    answer, call, world = {"word": os.urandom(16).hex(), "record": record}, None, None
    while True:
        if (latest := _read_json(folder / "call")) and latest != call:
            call, world = latest, None
            _write_json(folder / "answers" / f"{call}-{facts.rank}", answer)
            soon()
        # The world of a launch that was killed lacks this rank's word; it is read once, too.
        if call and world is None:
            world = _read_json(folder / f"world-{call}")
            if world and world["tokens"][facts.rank : facts.rank + 1] == [answer["word"]]:
                return [{**world["kinds"][kind], "rank": rank} for rank, kind in enumerate(world["of"])]
        wait("no answer of rank 0" if call else "missing: rank 0")


def _write_json(path: Path, value: Any) -> None:
    # A launch does not survive a crash of its nodes, and a thousand fsyncs take a disk 3 s.
    private.write(path, json.dumps(value), survives=False)


def _read_json(path: Path) -> Any:
    """Read a file that other processes replace as a whole; None if it does not exist."""
    with contextlib.suppress(FileNotFoundError):
        return json.loads(private.read(path))
    return None
