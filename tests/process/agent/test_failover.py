"""A rank dies, and the run goes on: real ranks on nodes of pretended names, a client that computes meanwhile."""

from __future__ import annotations

import json
import subprocess
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
import ranks
from leaders import BEGIN
from waiting import scaled


class World:
    """Ranks as srun would start them, each with the name of its node."""

    def __init__(self, folder: Path, nodes: str, code: str, gpus: int = 2) -> None:
        script = ranks.script(folder, BEGIN + textwrap.dedent(code))
        pids = folder / "pids"
        pids.touch()
        self.processes = [
            subprocess.Popen(
                ranks.command(script, str(pids), options=("--gpus", f"sim:{gpus}", "--rendezvous", "file")),
                env=ranks.environment(HOME=str(folder), TMPDIR=str(folder), **variables(nodes, rank)),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=(folder / f"err-{rank}").open("w"),
                text=True,
            )
            for rank in range(len(nodes))
        ]
        pids.write_text(json.dumps([p.pid for p in self.processes]))
        self._folder = folder

    def said(self, rank: int) -> str:
        return (self._folder / f"err-{rank}").read_text()

    def end(self) -> list[str]:
        """Wait for all ranks; return what each has written to its stdout."""
        try:
            return [p.communicate(timeout=scaled(120))[0] for p in self.processes]
        except subprocess.TimeoutExpired:
            pytest.fail(f"the ranks do not end:\n{self.story}")

    @property
    def codes(self) -> list[int]:
        return [p.returncode for p in self.processes]

    @property
    def story(self) -> str:
        return "\n".join(f"rank {r}: {p.returncode}\n{self.said(r)}" for r, p in enumerate(self.processes))


def variables(nodes: str, rank: int) -> Mapping[str, str]:
    facts = {
        "JOB_ID": "77",
        "STEP_ID": "0",
        "JOB_NUM_NODES": str(len(set(nodes))),
        "PROCID": str(rank),
        "STEP_NUM_TASKS": str(len(nodes)),
        "LOCALID": str(nodes[:rank].count(nodes[rank])),
    }
    return {**{f"SLURM_{k}": v for k, v in facts.items()}, "SLURMD_NODENAME": nodes[rank]}


@contextmanager
def world(folder: Path, nodes: str, code: str, gpus: int = 2) -> Iterator[World]:
    """Start a rank for each letter, which names its node."""
    made = World(folder, nodes, code, gpus)
    try:
        yield made
    finally:
        for process in made.processes:
            if process.poll() is None:
                process.kill()
                process.wait()


@pytest.mark.parametrize(
    ("deaths", "successor"),
    [
        ("wait_for_new(kill(1), *mine)", 2),
        ("wait_for_new(kill(1), *mine); wait_for_new(kill(2), *mine)", 3),
        ("wait_for_new(kill(2, 1), *mine)", 3),
    ],
    ids=["one-death", "its-heirs-too", "both-at-once"],
)
def test_lowest_living_rank_takes_over_a_dead_leaders_workers(tmp_path: Path, deaths: str, successor: int) -> None:
    code = f"""
        mine = ("b-0", "b-1", "b-2")
        bound = bindings()
        asked = c.map(slow, range(300))
        known = c.submit(slow, 41, key="known", workers=addresses()["b-0"], allow_other_workers=True)
        known.result()
        {deaths}
        assert c.gather(asked) == list(range(1, 301))
        assert known.result() == 42
        assert bindings() == bound, (bindings(), bound)
        print(leaders())
        sys.stdout.flush()
        c.run(lambda dask_worker: os.write(1, f"I am {{dask_worker.name}}\\n".encode()))
    """
    with world(tmp_path, "abbb", code, gpus=3) as ranked:
        printed = ranked.end()
        assert ranked.codes == [0, -9, 0, 0] if successor == 2 else [0, -9, -9, 0], ranked.story
        assert printed[0].startswith(
            str({"a-0": 0, "a-1": 0, "a-2": 0, "b-0": successor, "b-1": successor, "b-2": successor})
        )
        own = {"b-0", "b-1"} if successor == 2 else {"b-0", "b-1", "b-2"}
        assert {line.removeprefix("I am ") for line in printed[successor].splitlines()} == own, printed
        assert printed[3].endswith("I am b-2\n") or successor == 3, printed
        assert f"b: the leader died; rank {successor} leads, and 3 workers are back after" in ranked.said(successor)
        assert sorted(p.name for p in tmp_path.glob("hpcgpu-run-*")) == []


def test_sole_copies_of_a_dead_leaders_workers_are_lost(tmp_path: Path) -> None:
    code = """
        there = addresses()["b-0"]
        scattered = c.scatter([1], workers=[there])[0]
        after = c.submit(slow, scattered)
        assert after.result() == 2
        wait_for_new(kill(1), "b-0", "b-1")
        wait(lambda: scattered.status != "finished")
        print(scattered.status, c.submit(slow, 2).result())
    """
    with world(tmp_path, "abb", code) as ranked:
        printed = ranked.end()
        assert ranked.codes == [0, -9, 0], ranked.story
        assert printed[0].split()[-1] == "3", (printed, ranked.story)


@pytest.mark.parametrize(
    ("nodes", "died", "leader", "gone"), [("abbb", 3, 1, "b-2"), ("aaab", 2, 0, "a-2")], ids=["another", "rank-0s"]
)
def test_a_dead_followers_worker_retires_with_its_data(
    tmp_path: Path, nodes: str, died: int, leader: int, gone: str
) -> None:
    code = f"""
        wait(lambda: len(addresses()) == 6)
        data = c.scatter([[1, 2, 3]], workers=[addresses()[{gone!r}]])[0]
        asked = c.map(slow, range(200))
        kill({died})
        wait(lambda: {gone!r} not in addresses())
        assert c.gather(asked) == list(range(1, 201))
        assert data.result() == [1, 2, 3]
        print(*sorted(addresses()))
    """
    with world(tmp_path, nodes, code, gpus=3) as ranked:
        printed = ranked.end()
        assert ranked.codes == [-9 if rank == died else 0 for rank in range(4)], ranked.story
        names = {f"{node}-{i}" for node in "ab" for i in range(3)} - {gone}
        assert set(printed[0].split()) == names, ranked.story
        assert f"hpcgpu: {gone[0]}: rank {died} died; its worker {gone} was retired\n" in ranked.said(leader)


def test_the_last_workers_stay_though_their_rank_died(tmp_path: Path) -> None:
    code = """
        kill(1)
        wait_until_said(0, "rank 1 died")
        print(c.submit(slow, 1).result(), *sorted(addresses()))
    """
    with world(tmp_path, "aa", code) as ranked:
        assert ranked.end()[0] == "2 a-0 a-1\n", ranked.story
        assert ranked.codes == [0, -9], ranked.story
        why = "its workers a-0, a-1 stay: there is no other to take the data and the tasks"
        assert f"hpcgpu: a: rank 1 died; {why}\n" in ranked.said(0)


def test_retired_worker_stays_away_under_the_next_leader(tmp_path: Path) -> None:
    code = """
        kill(3)
        wait_until_said(1, "rank 3 died")
        wait_for_new(kill(1), "b-0", "b-1")
        print(leaders())
    """
    with world(tmp_path, "abbb", code, gpus=3) as ranked:
        printed = ranked.end()
        assert ranked.codes == [0, -9, 0, -9], ranked.story
        assert printed[0] == f"{ {'a-0': 0, 'a-1': 0, 'a-2': 0, 'b-0': 2, 'b-1': 2} }\n", ranked.story


def test_only_a_leader_without_an_heir_is_said_to_be_lost(tmp_path: Path) -> None:
    code = """
        kill(2)
        kill(1)  # the other's time is up before this one's
        wait_until_said(0, "lost its leader")
        print(*sorted(addresses()), c.submit(slow, 1).result())
    """
    with world(tmp_path, "abcc", code) as ranked:
        printed = ranked.end()
        assert ranked.codes == [0, -9, -9, 0], ranked.story
        assert printed[0] == "a-0 a-1 c-0 c-1 2\n", ranked.story
        lost = [line for line in ranked.said(0).splitlines() if "lost its leader" in line]
        assert lost == ["hpcgpu: node b lost its leader; its workers are gone"]


def test_the_end_of_a_run_is_nobodys_death(tmp_path: Path) -> None:
    with world(tmp_path, "aabbc", "pass") as ranked:
        ranked.end()
        assert ranked.codes == [0] * 5, ranked.story
        assert "died" not in ranked.story
        assert "lost" not in ranked.story
