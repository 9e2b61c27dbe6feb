"""Ranks that meet by files: also in the folder of a launch of the same name that was killed."""

from __future__ import annotations

import os
import time
from concurrent.futures import Future
from pathlib import Path

import pytest
from waiting import aside, scaled, until

from hpcgpu.agent.rendezvous import clear_old, meet_by_files
from hpcgpu.errors import LaunchError
from hpcgpu.model import RankFacts

SIZE = 3


def come(folder: Path, rank: int, life: str) -> Future:
    record = {"rank": rank, "life": life}
    facts = RankFacts(rank=rank, size=SIZE, launcher="srun")
    return aside(lambda: meet_by_files(record, facts, folder, 30))


def met(comers: list[Future]) -> list[list[str]]:
    return [[record["life"] for record in future.result(scaled(30))] for future in comers]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_restarted_launch_meets_only_its_own_ranks(tmp_path: Path, order: tuple[int, ...]) -> None:
    folder = tmp_path / "rendezvous"
    assert met([come(folder, rank, "first") for rank in range(SIZE)]) == [["first"] * SIZE] * SIZE
    before = {path.name: path.read_text() for path in folder.iterdir()}
    comers = {}
    for rank in order:
        comers[rank] = come(folder, rank, "second")
        mine = folder / ("call" if rank == 0 else f"rank-{rank}")  # each is at work before the next one comes
        until(lambda mine=mine: mine.read_text() != before[mine.name], "its next try", while_=comers[rank])
    assert met(list(comers.values())) == [["second"] * SIZE] * SIZE


def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    facts = [RankFacts(rank=rank, size=SIZE, launcher="srun") for rank in range(SIZE)]
    comers = [aside(lambda f=f: meet_by_files({}, f, tmp_path / "rendezvous", 1)) for f in facts[:2]]
    for future, why in zip(comers, ("missing: rank 2", "no answer of rank 0"), strict=True):
        with pytest.raises(LaunchError, match=rf"not all 3 ranks came .* within 1 s \(--death-timeout\); {why}\."):
            future.result(scaled(30))
    with pytest.raises(LaunchError, match="missing: rank 0"):
        meet_by_files({}, facts[2], tmp_path / "another", 0.1)


def test_folders_of_launches_long_gone_go(tmp_path: Path) -> None:
    for name, age_s in (("old", 90000), ("young", 60)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "world").write_text("{}")
        os.utime(tmp_path / name, (time.time() - age_s,) * 2)
    clear_old(tmp_path)
    clear_old(tmp_path / "none")
    assert [path.name for path in tmp_path.iterdir()] == ["young"]
