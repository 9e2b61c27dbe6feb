"""A rank dies, and the run goes on: real ranks on nodes with invented names, a client that computes meanwhile."""

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


def test_dead_leader_costs_its_node_and_the_run_goes_on(tmp_path: Path) -> None:
    code = """
        scattered = c.scatter([1], workers=[addresses()["b-0"]])[0]
        asked = c.map(slow, range(300))
        kill(1)
        wait_until_said(0, "lost its leader")
        assert c.gather(asked) == list(range(1, 301))
        wait(lambda: scattered.status != "finished")
        print(scattered.status, *sorted(addresses()), c.submit(slow, 1).result())
    """
    with world(tmp_path, "abbcc", code) as ranked:
        printed = ranked.end()
        assert ranked.codes == [0, -9, 70, 0, 0], ranked.story
        assert printed[0].split()[1:] == ["a-0", "a-1", "c-0", "c-1", "2"], (printed, ranked.story)
        lost = [line for line in ranked.said(0).splitlines() if "lost its leader" in line]
        assert lost == ["hpcgpu: node b lost its leader; its workers are gone"]
        assert ranked.said(2).endswith("hpcgpu: rank 2: the leader of this node ended without a goodbye\n")
        assert list(tmp_path.glob("hpcgpu-run-*")) == []


def test_dead_waiting_rank_costs_nothing(tmp_path: Path) -> None:
    code = """
        data = c.scatter([1], workers=[addresses()["b-1"]])[0]
        kill(2)
        wait(lambda: not os.path.exists(f"/proc/{pids[2]}") or "Z" in open(f"/proc/{pids[2]}/stat").read())
        c.run(lambda dask_worker: os.write(1, f"I am {dask_worker.name}\\n".encode()))
        print(c.gather(c.map(slow, range(200))) == list(range(1, 201)), data.result(), *sorted(addresses()))
    """
    with world(tmp_path, "abb", code) as ranked:
        printed = ranked.end()
        assert ranked.codes == [0, 0, -9], ranked.story
        assert printed[0].endswith("True 1 a-0 a-1 b-0 b-1\n"), ranked.story
        assert sorted(printed[1].splitlines()) == ["I am b-0", "I am b-1"]  # a leader's output is its workers' output
        assert "lost" not in ranked.story
