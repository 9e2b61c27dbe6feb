"""Who has not come to the rendezvous, in words, on one node and on several."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from hpcgpu.agent import rendezvous
from hpcgpu.agent.rendezvous import MissingRanks, NodeRanks, describe
from hpcgpu.host import process
from hpcgpu.host import process as process_of_host
from hpcgpu.launch import read_rank


def test_what_is_seen_and_what_is_not_is_told_apart() -> None:
    one = NodeRanks("n1", (0, 1), {2: "process 7 is stopped"})
    began = "not all 3 ranks came to the rendezvous within 60 s (--death-timeout)"
    there = "There: ranks 0-1 on n1"
    assert describe(3, [one], 60, "") == f"{began}. Missing: rank 2 on n1 (process 7 is stopped). {there}"
    alone = describe(4, [NodeRanks("n1", (0, 1, 2), {})], 60, "", {})
    assert "Missing: rank 3 (no process is seen). There: ranks 0-2 on n1. Only this rank's node is seen" in alone
    slurm = describe(6, [NodeRanks("n1", (0, 1, 2), {})], 60, "/home/a/m", {"SLURM_STEP_NODELIST": "n[1-2]"})
    assert "ranks 3-5 (no process is seen)" in slurm
    assert slurm.endswith("Seen are the nodes of n[1-2] that share /home/a/m")


def test_ranks_that_are_all_there_are_not_called_missing() -> None:
    said = describe(2, [NodeRanks("n1", (0,), {}), NodeRanks("n2", (1,), {})], 60, "/home/a/m")
    assert said.startswith("all 2 ranks came to the rendezvous, but MPI did not connect them within 60 s")
    assert "--rendezvous file" in said


def _rank(rank: int, launch: str = "a@1") -> dict[str, str]:
    return {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": "4", "PMIX_NAMESPACE": launch}


def test_nodes_that_share_a_folder_are_said_once_and_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    me = process.start_time(os.getpid())
    assert me

    def in_rank(rank: int, title: str, launch: str = "a@1") -> process.Process:
        return process.Process(1 << 30 | rank, 1, me, "S", title, _rank(rank, launch))

    nodes = {
        "n1": [in_rank(0, rendezvous.TITLE), in_rank(0, "hpcgpu-fork"), in_rank(3, rendezvous.TITLE, "another@1")],
        "n2": [in_rank(1, rendezvous.TITLE), in_rank(2, "python3")],
    }
    monkeypatch.setattr(process_of_host, "set_title", lambda _: None)
    monkeypatch.setattr(process, "user_processes", lambda: nodes[threading.current_thread().name])
    ends = [
        threading.Thread(
            target=MissingRanks(read_rank(_rank(rank)), _rank(rank), host, tmp_path / "rendezvous", 60, 0.5).report,
            name=host,
        )
        for rank, host in ((0, "n1"), (1, "n2"))
    ]
    for thread in ends:
        thread.start()
    for thread in ends:
        thread.join()
    pid = 1 << 30 | 2
    assert capsys.readouterr().err == (
        "hpcgpu: not all 4 ranks came to the rendezvous within 60 s (--death-timeout). Missing: "
        f"rank 2 on n2 (process {pid} has not come so far), rank 3 (no process is seen). "
        f"There: rank 0 on n1, rank 1 on n2. Seen are the nodes that share {tmp_path}/rendezvous\n"
    )
    assert not (tmp_path / "rendezvous").exists()


@pytest.mark.parametrize("made_anew", [False, True], ids=["gone", "made-anew"])
def test_a_node_that_looks_while_another_clears_up_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], made_anew: bool
) -> None:
    me = process.start_time(os.getpid())
    assert me
    monkeypatch.setattr(process_of_host, "set_title", lambda _: None)
    monkeypatch.setattr(
        process, "user_processes", lambda: [process.Process(1 << 30, 1, me, "S", rendezvous.TITLE, _rank(1))]
    )
    folder, together_s = tmp_path / "rendezvous", 0.25
    absence = MissingRanks(read_rank(_rank(1)), _rank(1), "n2", folder, 60, together_s)
    absence.note()

    def clear_up(seconds: float) -> None:
        if seconds == together_s and folder.exists():
            folder.rename(tmp_path / "cleared")
            if made_anew:
                folder.mkdir()
                (folder / "late-n2").touch()

    monkeypatch.setattr(rendezvous.time, "sleep", clear_up)
    absence.report()
    assert capsys.readouterr().err == ""
