"""Ranks that meet by files or by MPI, in any order, and who has not come, in words."""

import itertools
import json
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest
from shared_host import NEIGHBOUR, by_root
from waiting import aside, scaled, until

from hpcgpu.agent.meet_by_files import clear_old, meet_by_files
from hpcgpu.agent.meet_by_mpi import opened, sealed, wait_for_leader
from hpcgpu.agent.missing_ranks import TITLE, MissingRanks, NodeRanks, describe
from hpcgpu.errors import LaunchError, WorldError
from hpcgpu.host import private, process
from hpcgpu.launch.environment import read_rank
from hpcgpu.model import RankFacts

SIZE = 3
LATE = """
import sys, time
from pathlib import Path
from hpcgpu.agent.meet_by_files import meet_by_files
from hpcgpu.errors import LaunchError
from hpcgpu.model import RankFacts
opens = []
sys.addaudithook(lambda event, args: event == "open" and str(args[0]).startswith(sys.argv[1]) and opens.append(now()))
now = time.monotonic
try:
    meet_by_files({}, RankFacts(rank=1, size=2, launcher="srun"), Path(sys.argv[1]), 6.0)
except LaunchError:
    print(*opens)
"""
ANSWERED = """
import json, sys, time
from pathlib import Path
from hpcgpu.agent.meet_by_files import meet_by_files
from hpcgpu.errors import LaunchError
from hpcgpu.host import private
from hpcgpu.model import RankFacts
folder, pauses = Path(sys.argv[1]), []
private.make_folder(folder / "answers")
private.write(folder / "call", json.dumps("a call"))
sleep = time.sleep
time.sleep = lambda pause_s: (pauses.append((time.monotonic(), pause_s)), sleep(pause_s))
try:
    meet_by_files({}, RankFacts(rank=1, size=2, launcher="srun"), folder, 4.0)
except LaunchError:
    print(*[pause_s for at_s, pause_s in pauses if at_s - pauses[0][0] < 1.9])
"""
LEAD = """
import os, sys
from hpcgpu.agent.missing_ranks import TITLE
from hpcgpu.host import process
print("up", flush=True)
sys.stdin.readline()
with process.titled(TITLE):
    print("at the rendezvous", flush=True)
    sys.stdin.readline()
"""
MEET = """
import json, os
from hpcgpu.agent.meet_by_mpi import meet_by_mpi
from hpcgpu.model import RankFacts
before = dict(os.environ)
(met,) = meet_by_mpi(lambda: dict(os.environ), RankFacts(rank=0, size=1, launcher="none"))
after = {k: v for k, v in os.environ.items() if not k.startswith("PMIX_")}  # Open MPI's, of a rank without mpirun
print(json.dumps([met, {k: v for k, v in before.items() if after.get(k) != v}, [k for k in after if k not in before]]))
"""


def come(folder: Path, rank: int, life: str) -> Future:
    record = {"rank": rank, "life": life}
    facts = RankFacts(rank=rank, size=SIZE, launcher="srun")
    return aside(lambda: meet_by_files(record, facts, folder, 30))


def met(comers: list[Future]) -> list[list[str]]:
    return [[record["life"] for record in future.result(scaled(30))] for future in comers]


def texts(folder: Path, rank: int) -> set[str]:
    """What a rank has written."""
    return {path.read_text() for path in folder.glob(f"answers/*-{rank}" if rank else "call")}


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_restarted_launch_meets_only_its_own_ranks(tmp_path: Path, order: tuple[int, ...]) -> None:
    folder = tmp_path / "rendezvous"
    assert met([come(folder, rank, "first") for rank in range(SIZE)]) == [["first"] * SIZE] * SIZE
    comers = {}
    for rank in order:
        before = texts(folder, rank)
        comers[rank] = come(folder, rank, "second")
        # each is at work before the next one comes
        until(lambda r=rank, b=before: texts(folder, r) != b, "its next try", while_=comers[rank])
    assert met(list(comers.values())) == [["second"] * SIZE] * SIZE


def test_records_of_a_launch_are_secret_and_its_ranks_only() -> None:
    """Whoever plays a rank over Open MPI's open ports has no key."""
    record = json.dumps({"rank": 3, "scheduler": {"key": "MIGHAgEA"}}).encode()
    text = sealed(record, 3, "key")
    assert b"MIGHAgEA" not in text
    assert opened(text, 3, "key").rstrip() == record
    changed = text[:-1] + bytes([text[-1] ^ 1])
    for forged in (changed, sealed(record, 3, "other"), sealed(record, 3, ""), sealed(record, 2, "key")):
        with pytest.raises(WorldError, match=r"rank 3 is not of this launch.*--rendezvous file"):
            opened(forged, 3, "key")


def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    facts = [RankFacts(rank=rank, size=SIZE, launcher="srun") for rank in range(SIZE)]
    comers = [aside(lambda f=f: meet_by_files({}, f, tmp_path / "rendezvous", 1)) for f in facts[:2]]
    for future, why in zip(comers, ("missing: rank 2", "no answer of rank 0"), strict=True):
        with pytest.raises(LaunchError, match=rf"not all 3 ranks came .* within 1 s \(--death-timeout\); {why}\."):
            future.result(scaled(30))
    with pytest.raises(LaunchError, match="missing: rank 0"):
        meet_by_files({}, facts[2], tmp_path / "another", 0.1)


def test_waiting_rank_opens_one_folder_a_second(tmp_path: Path) -> None:
    """Whoever waits longer than a few seconds is one of many, and the file system is shared."""
    argv = [sys.executable, "-c", LATE, str(tmp_path / "rendezvous")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=scaled(60), check=True)
    opens = [float(word) for word in done.stdout.split()]
    late = [at for at in opens if 3.5 < at - opens[0] < 5.9]
    assert late
    assert all(after - before >= 1.0 for before, after in itertools.pairwise(late))


def test_rank_that_has_answered_looks_often_until_all_have(tmp_path: Path) -> None:
    """Ranks see the call of rank 0 within a second; the answer comes after the last of them has."""
    argv = [sys.executable, "-c", ANSWERED, str(tmp_path / "rendezvous")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=scaled(60), check=True)
    pauses_s = [float(word) for word in done.stdout.split()]
    assert pauses_s
    assert max(pauses_s) <= 0.2 * 1.5


def test_world_is_read_once_by_each_and_has_like_records_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads, read = list[str](), private.read
    monkeypatch.setattr(private, "read", lambda path: (read(path), reads.append(path.name))[0])
    records = [{"rank": rank, "host": f"n{rank // 4}", "cpus": "0-127"} for rank in range(8)]
    facts = [RankFacts(rank=rank, size=8, launcher="srun") for rank in range(8)]
    comers = [
        aside(lambda r=r, f=f: meet_by_files(r, f, tmp_path / "ranks", 30)) for r, f in zip(records, facts, strict=True)
    ]
    assert [future.result(scaled(30)) for future in comers] == [records] * 8
    (world,) = (tmp_path / "ranks").glob("world-*")
    assert world.read_text().count("0-127") == 2
    assert reads.count(world.name) == 7


def test_starved_rank_sees_two_changes_of_one_time_stamp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses = itertools.count(1)

    def sleep(_: float) -> None:
        if next(pauses) == 2:
            (answer,) = (tmp_path / "answers").iterdir()
            world = {"tokens": ["", json.loads(answer.read_text())["word"]], "of": [0, 0], "kinds": [{"life": "only"}]}
            private.write(tmp_path / "world-a", json.dumps(world))
        os.utime(tmp_path, (1, 1))
        clock.now += 3.0

    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now, sleep=sleep)
    monkeypatch.setattr("hpcgpu.agent.meet_by_files.time", clock)
    private.make_folder(tmp_path / "answers")
    tmp_path.chmod(0o700)
    private.write(tmp_path / "call", '"a"')
    met = meet_by_files({}, RankFacts(rank=1, size=2, launcher="srun"), tmp_path, 30.0)
    assert ([record["life"] for record in met], clock.now) == (["only"] * 2, 6.0)


def test_answer_is_looked_for_until_a_stamp_is_past(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else changes; a thousand ranks look for a file each time."""

    def sleep(pause_s: float) -> None:
        os.utime(tmp_path, ns=(1, 1))  # of a file system that counts ticks
        clock.now += pause_s + 0.001

    reads, read = list[str](), private.read
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now, sleep=sleep)
    monkeypatch.setattr("hpcgpu.agent.meet_by_files.time", clock)
    monkeypatch.setattr(private, "read", lambda path: (reads.append(path.name), read(path))[1])
    private.make_folder(tmp_path / "answers")
    tmp_path.chmod(0o700)
    private.write(tmp_path / "call", '"a"')
    with pytest.raises(LaunchError, match="no answer of rank 0"):
        meet_by_files({}, RankFacts(rank=1, size=2, launcher="srun"), tmp_path, 4.0)
    assert 2 <= reads.count("world-a") <= 6


def test_ranks_that_meet_wait_for_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    assert met([come(tmp_path / "ranks", rank, "only") for rank in range(SIZE)]) == [["only"] * SIZE] * SIZE
    assert synced == []


def test_folders_of_launches_long_gone_go(tmp_path: Path) -> None:
    for name, age_s in (("old", 90000), ("young", 60)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "world").write_text("{}")
        os.utime(tmp_path / name, (time.time() - age_s,) * 2)
    clear_old(tmp_path)
    clear_old(tmp_path / "none")
    assert [path.name for path in tmp_path.iterdir()] == ["young"]


@pytest.fixture
def launch() -> str:
    return uuid.uuid4().hex


def leads(launch: str) -> dict[str, str]:
    """What the leader of a launch has in its environment."""
    own = {"OMPI_COMM_WORLD_RANK": "4", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    return {**os.environ, **own, "PMIX_NAMESPACE": launch}


@pytest.fixture
def leader(launch: str) -> Iterator[subprocess.Popen[str]]:
    argv = [sys.executable, "-c", LEAD]
    with subprocess.Popen(argv, env=leads(launch), stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout.readline() == "up\n"
        yield process
        process.kill()


def test_followers_go_when_their_leader_does(launch: str, leader: subprocess.Popen[str]) -> None:
    follower = aside(lambda: wait_for_leader(launch))
    with pytest.raises(TimeoutError):
        follower.result(2)  # longer than for a leader that cannot be seen
    leader.stdin.write("come\n")
    leader.stdin.flush()
    assert leader.stdout.readline() == "at the rendezvous\n"
    follower.result(5)


def test_dead_leader_or_another_launchs_is_not_waited_for(launch: str, leader: subprocess.Popen[str]) -> None:
    another = aside(lambda: wait_for_leader(uuid.uuid4().hex))
    another.result(8)  # 10 s is for a leader that is there
    leader.kill()
    leader.wait()
    aside(lambda: wait_for_leader(launch)).result(8)


@by_root
def test_another_user_who_plays_the_leader_is_not_waited_for(launch: str) -> None:
    """A launch's name can be guessed; root sees, and could be told, what stands in anybody's environment."""
    pipe, user = subprocess.PIPE, {"user": NEIGHBOUR, "group": NEIGHBOUR, "extra_groups": ()}
    argv = ["sh", "-c", "echo up; read -r rest"]
    with subprocess.Popen(argv, env=leads(launch), stdin=pipe, stdout=pipe, text=True, **user) as neighbour:
        assert neighbour.stdout.readline() == "up\n"
        assert neighbour.pid not in {p.pid for p in process.user_processes()}
        aside(lambda: wait_for_leader(launch)).result(8)  # 10 s is for a leader that is there
        assert neighbour.poll() is None
        neighbour.kill()


def test_siblings_are_the_other_children_of_the_parent() -> None:
    """A rank and its leader, as their launcher starts them: nobody else's environment is read."""
    there = "process.children(os.getppid())"
    code = f"import os; from hpcgpu.host import process; print(os.getpid(), *[p.pid for p in {there}])"
    script = f'sleep 60 & first=$!; {sys.executable} -c "{code}"; echo $first; kill $first'
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=scaled(60), check=True)
    (own, *siblings), (first,) = (line.split() for line in done.stdout.splitlines())
    assert siblings == [first, own]


def test_describe_tells_seen_missing_and_complete_ranks_apart() -> None:
    one = NodeRanks("n1", (0, 1), {2: "process 7 is stopped"})
    began = "not all 3 ranks came to the rendezvous within 60 s (--death-timeout)"
    there = "There: ranks 0-1 on n1"
    assert describe(3, [one], 60, "") == f"{began}. Missing: rank 2 on n1 (process 7 is stopped). {there}"
    alone = describe(4, [NodeRanks("n1", (0, 1, 2), {})], 60, "", {})
    assert "Missing: rank 3 (no process is seen). There: ranks 0-2 on n1. Only this rank's node is seen" in alone
    slurm = describe(6, [NodeRanks("n1", (0, 1, 2), {})], 60, "/home/a/m", {"SLURM_STEP_NODELIST": "n[1-2]"})
    assert "ranks 3-5 (no process is seen)" in slurm
    assert slurm.endswith("Seen are the nodes of n[1-2] that share /home/a/m")
    complete = describe(2, [NodeRanks("n1", (0,), {}), NodeRanks("n2", (1,), {})], 60, "/home/a/m")
    assert complete.startswith("all 2 ranks came to the rendezvous, but MPI did not connect them within 60 s")
    assert "--rendezvous file" in complete


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
        "n1": [in_rank(0, TITLE), in_rank(0, "hpcgpu-fork"), in_rank(3, TITLE, "another@1")],
        "n2": [in_rank(1, TITLE), in_rank(2, "python3")],
    }
    monkeypatch.setattr(process, "set_title", lambda _: None)
    monkeypatch.setattr(process, "user_processes", lambda: nodes[threading.current_thread().name])
    folder, ends = tmp_path / "rendezvous", list[threading.Thread]()
    for rank, host in ((0, "n1"), (1, "n2")):
        looks = MissingRanks(read_rank(_rank(rank)), _rank(rank), host, lambda: folder, 60, 0.5)
        ends.append(threading.Thread(target=looks.report, name=host))
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
    monkeypatch.setattr(process, "set_title", lambda _: None)
    one = process.Process(1 << 30, 1, me, "S", TITLE, _rank(1))
    monkeypatch.setattr(process, "user_processes", lambda: [one])
    folder, together_s = tmp_path / "rendezvous", 0.25
    absence = MissingRanks(read_rank(_rank(1)), _rank(1), "n2", lambda: folder, 60, together_s)
    absence.note()

    def clear_up(seconds: float) -> None:
        if seconds == together_s and folder.exists():
            folder.rename(tmp_path / "cleared")
            if made_anew:
                folder.mkdir()
                (folder / "late-n2").touch()

    monkeypatch.setattr(time, "sleep", clear_up)
    absence.report()
    assert capsys.readouterr().err == ""


def test_meet_by_mpi_uses_no_gpu_and_keeps_the_sites_values() -> None:
    pytest.importorskip("mpi4py")
    exported = {"MPICH_GPU_SUPPORT_ENABLED": "1", "OMPI_MCA_accelerator": "cuda", "MV2_USE_CUDA": "1", "PSP_CUDA": "1"}
    others = {"OMPI_MCA_opal_cuda_support": "0", "MPIR_CVAR_ENABLE_GPU": "0", "I_MPI_OFFLOAD": "0"}
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMI", "SLURM_"))} | exported
    environ |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run([sys.executable, "-c", MEET], env=environ, capture_output=True, text=True, timeout=scaled(60))
    assert done.returncode == 0, done.stderr
    met, changed, new = json.loads(done.stdout)
    assert {name: met.get(name) for name in exported} == {
        **dict.fromkeys(exported, "0"),
        "OMPI_MCA_accelerator": "null",
    }
    assert {name: met.get(name) for name in others} == others
    assert changed == {}
    assert new == []
