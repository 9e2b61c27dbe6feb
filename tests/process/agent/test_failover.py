"""A rank dies, and the run goes on: real ranks on nodes of pretended names, a client that computes meanwhile."""

from __future__ import annotations

import json
import subprocess
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import ranks
from leaders import BEGIN
from waiting import scaled


class World:
    """Ranks as srun would start them, each with the name of its node."""

    def __init__(self, folder: Path, nodes: str, code: str, gpus: int) -> None:
        script = ranks.script(folder, BEGIN + textwrap.dedent(code))
        self._folder, pids = folder, folder / "pids"
        pids.touch()
        argv = ranks.command(script, str(pids), options=("--gpus", f"sim:{gpus}", "--rendezvous", "file"))
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "text": True}
        self.processes = [
            subprocess.Popen(argv, env=environment(folder, nodes, r), stderr=(folder / f"err-{r}").open("w"), **pipes)
            for r in range(len(nodes))
        ]
        pids.write_text(json.dumps([p.pid for p in self.processes]))

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


def environment(folder: Path, nodes: str, rank: int) -> dict[str, str]:
    job = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_JOB_NUM_NODES": str(len(set(nodes)))}
    place = {"SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": str(len(nodes)), "SLURMD_NODENAME": nodes[rank]}
    place["SLURM_LOCALID"] = str(nodes[:rank].count(nodes[rank]))
    return ranks.environment(HOME=str(folder), TMPDIR=str(folder), **job, **place)


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


@pytest.mark.parametrize("deaths", [((1,), (2,)), ((2, 1),)], ids=["and-its-heir-later", "both-at-once"])
def test_a_dead_leaders_workers_go_to_the_lowest_rank_alive(
    tmp_path: Path, deaths: tuple[tuple[int, ...], ...]
) -> None:
    """They compute on, bound as before; of data, only what a dead leader's worker alone had is lost."""
    code = f"""
        mine = ("b-0", "b-1", "b-2")
        bound = bindings()
        mapped = c.map(slow, range(300))
        result = c.submit(slow, 41, key="result", workers=addresses()["b-0"], allow_other_workers=True)
        scattered = c.scatter([1], workers=[addresses()["b-0"]])[0]
        result.result()
        for dead in {deaths}:
            wait_for_new(kill(*dead), *mine)
            print(leaders())
            sys.stdout.flush()
            c.run(lambda dask_worker: os.write(1, f"I am {{dask_worker.name}}\\n".encode()))
        wait(lambda: scattered.status != "finished")
        assert c.gather(mapped) == list(range(1, 301))
        assert result.result() == 42
        assert bindings() == bound, (bindings(), bound)
    """
    with world(tmp_path, "abbb", code, gpus=3) as ranked:
        printed = ranked.end()
        assert ranked.codes == [0, -9, -9, 0], ranked.story
        led = [eval(line) for line in printed[0].splitlines() if line[0] == "{"]
        assert [{by for name, by in leaders.items() if name[0] == "b"} for leaders in led] == [
            {dead[-1] + 1 if len(deaths) > 1 else 3} for dead in deaths
        ]
        speakers = {rank: {line[5:] for line in printed[rank].splitlines()} for rank in (2, 3)}
        assert speakers == {2: {"b-0", "b-1"} if len(deaths) > 1 else set(), 3: {"b-0", "b-1", "b-2"}}
        assert "b: the leader died; rank 3 leads, and 3 workers are back after" in ranked.said(3)
        assert sorted(p.name for p in tmp_path.glob("hpcgpu-run-*")) == []


@pytest.mark.parametrize(
    ("nodes", "died", "leader", "gone"), [("abbb", 3, 1, "b-2"), ("aaab", 2, 0, "a-2")], ids=["another", "rank-0s"]
)
def test_a_dead_followers_worker_retires_with_its_data(
    tmp_path: Path, nodes: str, died: int, leader: int, gone: str
) -> None:
    """And does not come back with the next leader."""
    code = f"""
        wait(lambda: len(addresses()) == 6)
        data = c.scatter([[1, 2, 3]], workers=[addresses()[{gone!r}]])[0]
        mapped = c.map(slow, range(200))
        kill({died})
        wait(lambda: {gone!r} not in addresses())
        assert c.gather(mapped) == list(range(1, 201))
        assert data.result() == [1, 2, 3]
        if {leader}:
            wait_for_new(kill({leader}), "b-0", "b-1")
        print(leaders())
    """
    with world(tmp_path, nodes, code, gpus=3) as ranked:
        printed = ranked.end()
        assert ranked.codes == [-9 if rank == died or rank == leader > 0 else 0 for rank in range(4)], ranked.story
        led = {**dict.fromkeys(("a-0", "a-1", "a-2"), 0), **dict.fromkeys(("b-0", "b-1", "b-2"), 2 if leader else 3)}
        assert eval(printed[0]) == {name: by for name, by in led.items() if name != gone}, ranked.story
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
        assert "hpcgpu: a: rank 1 died; its workers a-0, a-1 stay: " in ranked.said(0)


def test_only_a_leader_without_an_heir_is_said_to_be_lost(tmp_path: Path) -> None:
    """And nobody else at the end of the run."""
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
        lines = [line for rank in range(4) for line in ranked.said(rank).splitlines()]
        lost = "hpcgpu: node b lost its leader; its workers are gone"
        assert [line for line in lines if "lost its leader" in line] == [lost]
        assert len([line for line in lines if " died" in line]) == 1, ranked.story
