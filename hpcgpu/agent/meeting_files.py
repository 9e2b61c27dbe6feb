"""The meeting without MPI: by files in a folder that all nodes share.

The folder's name may be that of a launch that was killed, and its files still lie there. So rank 0 calls with a word
that nobody can know beforehand, each rank answers that call with a word of its own, and a rank takes only the world
that has both.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from hpcgpu.errors import LaunchError
from hpcgpu.host import private
from hpcgpu.model import CpuSet, RankFacts

if TYPE_CHECKING:
    from pathlib import Path

_POLL_S = 0.05
# Longer than any meeting; after it nobody needs its folder.
_OLD_S = 86400.0


def clear_old(home: Path) -> None:
    """Remove the folders that killed launches left in ``home``, where each launch has its own."""
    if home.is_dir():
        for folder in home.iterdir():
            if time.time() - folder.lstat().st_mtime > _OLD_S:
                shutil.rmtree(folder, ignore_errors=True)


def meet_by_files(own: Mapping[str, Any], facts: RankFacts, folder: Path, deadline_s: float) -> list[dict[str, Any]]:
    """Return the records of all ranks, in rank order.

    Rank 0 gathers the others' files into one: three reads per rank, however many there are.

    Parameters
    ----------
    own : mapping
        This rank's record.
    facts : RankFacts
        What the launcher promised: the number of ranks that rank 0 waits for.
    folder : Path
        Of this launch, on a file system that all ranks share; made with mode 0700, its files with 0600.
    deadline_s : float
        How long to wait for the other ranks, in seconds.

    Raises
    ------
    LaunchError
        Somebody did not come.

    """
    private.make_folder(folder)
    meeting = _Meeting(folder, facts, time.monotonic() + deadline_s, deadline_s)
    return meeting.gather(own) if facts.rank == 0 else meeting.answer(own)


class _Meeting:
    def __init__(self, folder: Path, facts: RankFacts, end: float, deadline_s: float) -> None:
        self._folder, self._facts, self._end, self._deadline_s = folder, facts, end, deadline_s
        self._call, self._world = _File(folder / "call"), _File(folder / "world")

    def gather(self, own: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Call the others, and show them the world once each has answered."""
        call = secrets.token_hex(16)
        private.write(self._call.path, json.dumps(call))
        files = {rank: _File(self._folder / f"rank-{rank}") for rank in range(1, self._facts.size)}
        answers: dict[int, Mapping[str, Any]] = {0: {"record": own}}

        def all_there() -> bool:
            for rank in files.keys() - answers.keys():
                answer = files[rank].read_new()
                if answer and answer["call"] == call:
                    answers[rank] = answer
            return len(answers) == self._facts.size

        def missing() -> str:
            away = CpuSet(files.keys() - answers.keys())
            return f"missing: rank{'s' if len(away) > 1 else ''} {away}"

        self._wait(all_there, missing)
        world = [answers[rank] for rank in sorted(answers)]
        private.write(self._world.path, json.dumps(world))
        return [answer["record"] for answer in world]

    def answer(self, own: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Answer each call, of which the last is rank 0's, and wait for a world that has the answer."""
        rank, word = self._facts.rank, secrets.token_hex(16)
        answered = {"call": "", "word": word}
        found: list[dict[str, Any]] = []

        def is_complete() -> bool:
            if call := self._call.read_new():
                answered["call"] = call
                private.write(self._folder / f"rank-{rank}", json.dumps({**answered, "record": own}))
            world = self._world.read_new()
            if world and rank < len(world) and answered.items() <= world[rank].items():
                found.extend(answer["record"] for answer in world)
            return bool(found)

        self._wait(is_complete, lambda: "no answer of rank 0" if answered["call"] else "missing: rank 0")
        return found

    def _wait(self, done: Callable[[], bool], missing: Callable[[], str]) -> None:
        while True:
            # Opening the folder has NFS ask the server: it remembers for 30 s that a name was not there (nfs(5)).
            os.close(os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY))
            if done():
                return
            if time.monotonic() > self._end:
                raise LaunchError(
                    f"not all {self._facts.size} ranks came to the meeting within {self._deadline_s:g} s "
                    f"(--death-timeout); {missing()}. They meet in {self._folder}: is it on a file system that all "
                    "nodes share?"
                )
            time.sleep(_POLL_S)


class _File:
    """A file that others replace as a whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen: tuple[int, int] | None = None

    def read_new(self) -> Any:  # noqa: ANN401 - of JSON
        """Return what is in it, or None when there is nothing since the last look."""
        try:
            facts = self.path.lstat()
            seen = (facts.st_ino, facts.st_mtime_ns)
            if seen == self._seen:
                return None
            text = private.read(self.path)
        except FileNotFoundError:
            return None
        self._seen = seen
        return json.loads(text)
