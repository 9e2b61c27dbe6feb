"""Jobs that come and go: a scheduler alone, and workers that join it and leave with their data."""

import asyncio
import functools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
import ranks
from comms import knock
from distributed import Client
from distributed.security import Security
from leaks import signal_all
from waiting import scaled, until

from hpcgpu import config
from hpcgpu.deploy.network import lease, scheduler_file
from hpcgpu.deploy.network.scheduler_file import Certificate, SchedulerFile, connect_first, security
from hpcgpu.errors import LaunchError
from hpcgpu.host import process
from hpcgpu.model import RunDocument, Settings
from hpcgpu.model.allocation import DOCUMENT

DEADLINE_S = 60
# Fill a file system of its own, in which a run's folder is.
FULL = """
mount -t tmpfs -o size=64k,nr_inodes=12 tmpfs "$0" && umask 77 && mkdir "$0/run" && touch "$0/run/lease" || exit 9
echo x > "$0/run/nonce"
{ head -c 99999 /dev/zero > "$0/full"; [ "$1" = bytes ] || rm "$0/full"; } 2> /dev/null
[ "$1" = bytes ] || for i in 1 2 3 4 5 6 7 8 9; do touch "$0/$i" || break; done 2> /dev/null
shift
exec "$@"
"""


class Ranks:
    """Starts rank programs of one cluster, as jobs do; ends what is left of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._started: list[subprocess.Popen[str]] = []

    def start(
        self, shape: str, *, launcher: tuple[str, ...] = (), env: dict[str, str] | None = None, **settings: Any
    ) -> subprocess.Popen[str]:
        given = Settings(**{"gpus": "sim:2", "dashboard": False, "client_grace_s": 3600.0, **settings})
        run = RunDocument(settings=given, shape=shape, folder=str(self.folder))
        argv = [*launcher, sys.executable, "-m", "hpcgpu.agent"]
        environ = ranks.environment(**{**(env or {}), DOCUMENT: config.render_document(run)})
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ)
        self._started.append(process)
        return process

    def member(self, job_id: str = "7", **settings: Any) -> subprocess.Popen[str]:
        return self.start("member", env={"HPCGPU_JOB_ID": job_id}, **settings)

    def published(self) -> SchedulerFile:
        return until(lambda: scheduler_file.read(self.folder), "the scheduler file", limit_s=DEADLINE_S)

    def client(self) -> Client:
        file = self.published()
        return Client(file.addresses[0], security=security(file.certificate))

    def end(self) -> None:
        for started in self._started:
            started.kill()
            started.communicate()


def workers(client: Client) -> list[str]:
    return sorted(w["name"] for w in client.scheduler_info(n_workers=-1)["workers"].values())


def wait_workers(client: Client, *names: str) -> None:
    until(lambda: workers(client) == sorted(names), f"workers {names}", limit_s=DEADLINE_S)


def end_of(process: subprocess.Popen[str], code: int = 0) -> str:
    """Wait for the end with this exit code, and return the output."""
    assert process.wait(DEADLINE_S) == code
    return process.stdout.read()


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    out = Ranks(scheduler_file.make_folder(tmp_path / "runs"))
    yield out
    out.end()


@pytest.fixture
def head(cluster: Ranks) -> subprocess.Popen[str]:
    return cluster.start("head")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount a file system")
@pytest.mark.parametrize("what", ["bytes", "inodes"])
def test_home_that_got_full_is_an_error_for_people(cluster: Ranks, tmp_path: Path, what: str) -> None:
    full, cluster.folder = tmp_path / "full", tmp_path / "full" / "run"
    full.mkdir()
    launcher = ("unshare", "--mount", "bash", "-c", FULL, str(full), what)
    said = end_of(cluster.start("head", launcher=launcher), code=1)
    assert "No space left on device" in said
    assert "df -i" in said
    assert "Traceback" not in said


def test_members_are_named_by_their_job_and_leave_in_time(cluster: Ranks, head: subprocess.Popen[str]) -> None:
    env = {"SLURM_JOB_ID": "30", "SLURM_ARRAY_JOB_ID": "29", "SLURM_ARRAY_TASK_ID": "4", "SLURM_RESTART_COUNT": "1"}
    ranked = cluster.start("member", launcher=(*ranks.MPIRUN, "-n", "2"), env={"HPCGPU_JOB_ID": "7_3"})
    other = cluster.member("9", gpus="sim:1")
    with cluster.client() as client:
        wait_workers(client, "7_3-0", "7_3-1", "9-0")
        short = cluster.start("member", env=env, walltime_s=24)  # on a slow machine workers take long
        wait_workers(client, "7_3-0", "7_3-1", "29_4-0r1", "29_4-1r1", "9-0")
        assert client.submit(sum, [1, 2]).result() == 3
        assert "its time ends in " in end_of(short)
        assert workers(client) == ["7_3-0", "7_3-1", "9-0"]
        before = set(client.run(os.getpid).values())
        os.kill(min(before), signal.SIGKILL)
        now = functools.partial(client.run, os.getpid, on_error="ignore")
        until(lambda: len(alive := set(now().values())) == 3 and alive != before, "another worker in its place")
        # the first rank has none that it must keep free for a scheduler
        client.retire_workers(names=["7_3-0"], close_workers=True)
        wait_workers(client, "7_3-1", "9-0")
        assert (ranked.poll(), other.poll()) == (None, None)
        client.retire_workers(names=["7_3-1"], close_workers=True)
        assert ranked.wait(DEADLINE_S) == 0, ranked.stdout.read()
        client.sync(client.scheduler.hpcgpu_lease, goodbye=True)
        assert [p.wait(DEADLINE_S) for p in (other, head)] == [0, 0]
    assert not (cluster.folder / "nonce").exists()


def test_a_warning_before_there_are_workers_ends_no_member(cluster: Ranks) -> None:
    """Slurm sends its signal up to a minute early; the leader's own warning comes in time."""
    member = cluster.start("member", env={"SLURM_JOB_ID": "31"}, walltime_s=3600)
    status = Path(f"/proc/{member.pid}/status")
    caught = re.compile(r"^SigCgt:\s(.*)$", re.M)
    bit = 1 << (signal.SIGUSR1 - 1)
    until(lambda: int(caught.search(status.read_text())[1], 16) & bit, "it listens", limit_s=DEADLINE_S)
    member.send_signal(signal.SIGUSR1)
    cluster.start("head")

    def has_all_workers() -> bool:
        """Tell whether the leader waits for their ends: until then a signal is one before there are workers."""
        return any("the end of all workers" in task.get_name() for task in asyncio.all_tasks())

    with cluster.client() as client:
        wait_workers(client, "31-0", "31-1")
        until(lambda: all(client.run(has_all_workers, nanny=True).values()), "the leader knows of them")
        member.send_signal(signal.SIGUSR1)
        assert "its time ends in " in end_of(member)


def test_a_member_that_must_go_hands_its_data_over(cluster: Ranks, head: subprocess.Popen[str], tmp_path: Path) -> None:
    """As long as another one can take it."""
    staying = cluster.member("2")

    def wait_for_file(path: str) -> str:
        Path(path).open().close()  # comes back when the test has opened it, too
        return path

    with cluster.client() as client, subprocess.Popen(["sleep", "600"]) as launcher, ExitStack() as stack:
        stack.callback(launcher.kill)
        for way in ("SIGUSR1", "SIGTERM", "launcher-gone-and-log-closed"):
            os.mkfifo(free := tmp_path / way)
            mark = process.mark(launcher.pid) if way.startswith("launcher") else ""
            leaving = cluster.start("member", env={"HPCGPU_JOB_ID": way, **({process.LAUNCHER: mark} if mark else {})})
            wait_workers(client, f"{way}-0", f"{way}-1", "2-0", "2-1")
            by_name = {w["name"]: a for a, w in client.scheduler_info(n_workers=-1)["workers"].items()}
            data = [client.scatter({i: str(i) * 1000}, workers=[by_name[f"{way}-{i}"]])[i] for i in range(2)]
            first = [by_name[f"{way}-0"]]
            running = client.submit(wait_for_file, str(free), workers=first, allow_other_workers=True)
            until(lambda first=first: client.processing(first)[first[0]], "the task is with its worker")
            family = psutil.Process(leaving.pid).children(recursive=True)
            assert len(family) == 3  # fork_server, two workers
            if mark:
                leaving.stdout.close()
                leaving.stdout = None
                launcher.kill()
                assert leaving.wait(DEADLINE_S) == 0
            else:
                signal_job(leaving, signal.Signals[way])
                assert "hand over their data and leave" in end_of(leaving)
            assert psutil.wait_procs(family, timeout=scaled(30))[1] == []
            wait_workers(client, "2-0", "2-1")
            assert client.gather(data) == ["0" * 1000, "1" * 1000]
            free.open("w").close()
            assert running.result(timeout=DEADLINE_S) == str(free)  # the running task has moved, too
            del data, running
        kept = client.scatter([1, 2])
        staying.send_signal(signal.SIGTERM)
        said = end_of(staying, 128 + signal.SIGTERM)
        del kept
    assert "it got SIGTERM" in said
    assert "could" in said


def test_processes_are_found_by_pid_host_and_start() -> None:
    with subprocess.Popen(["sleep", "600"]) as sleeping:
        named = process.mark(sleeping.pid)
        host, pid, started = named.split()
        assert process.find(named) == (sleeping.pid, int(started))
        assert process.find(f"another-{named}") is None
        assert process.find(f"{host} {pid} {int(started) - 1}") is None  # the pid was another process's
        sleeping.kill()
    assert process.find(named) is None
    assert process.find("") is None


def test_the_scheduler_of_a_job_says_that_its_time_ends(tmp_path: Path) -> None:
    """And neither the script nor a follower dies of the signal."""
    code = """
        import psutil, queue
        c, news = Client(), queue.Queue()
        c.subscribe_topic("hpcgpu", news.put)
        c.submit(sum, []).result()  # then the scheduler knows that
        for rank in psutil.Process(os.getppid()).parent().children():
            rank.send_signal(signal.SIGUSR1)
        _, event = news.get()
        for pid in [*c.run(os.getpid).values(), c.run_on_scheduler(os.getpid)]:
            os.kill(pid, signal.SIGUSR1)
        print(c.submit(sum, [1, 2]).result(), event["action"])
    """
    done = ranks.run(ranks.script(tmp_path, code), ranks=3)
    assert (done.returncode, done.stdout) == (0, "3 time-limit\n"), done.stderr
    assert "hpcgpu: the job's time ends soon" in done.stderr


def test_a_scheduler_that_dies_ends_its_members_with_the_reason(cluster: Ranks, head: subprocess.Popen[str]) -> None:
    member = cluster.member()
    with cluster.client() as client:
        wait_workers(client, "7-0", "7-1")
        os.kill(client.run_on_scheduler(os.getpid), signal.SIGKILL)
        assert "the scheduler is gone: no goodbye from tls://" in end_of(member, os.EX_UNAVAILABLE)
    assert head.wait(DEADLINE_S) == os.EX_SOFTWARE


def test_a_member_without_its_scheduler_says_why_at_once(cluster: Ranks) -> None:
    assert f"{cluster.folder} has no scheduler file" in end_of(cluster.member(death_timeout_s=1.0), 1)
    cluster.start("head")
    assert cluster.published()
    wrong = Certificate.make()
    facts = json.loads((cluster.folder / "scheduler").read_text())
    (cluster.folder / "scheduler").write_text(json.dumps({**facts, "cert": wrong.cert_pem, "key": wrong.key_pem}))
    assert "the certificates do not belong together" in end_of(cluster.member(death_timeout_s=3600.0), 1)


def test_a_certificate_that_the_other_side_refuses_is_told() -> None:
    """TLS 1.3 tells us that they refuse ours only after the handshake."""
    right, wrong = Certificate.make(), Certificate.make()
    parts = {"tls_worker_cert": wrong.cert_pem, "tls_worker_key": wrong.key_pem, "require_encryption": True}
    stranger = Security(tls_ca_file=right.cert_pem, **parts)
    with pytest.raises(LaunchError, match=r"the certificates do not belong together|it closed the connection"):
        # the closed port is tried for an hour
        knock(right, lambda address: connect_first(["tls://127.0.0.1:1", address], stranger, 3600))


def test_jobs_that_were_suspended_take_nobody_for_silent(cluster: Ranks) -> None:
    """Neither the client, nor the workers, whom distributed restarts after worker-ttl."""
    head = cluster.start("head", client_grace_s=6.0, env={"DASK_DISTRIBUTED__SCHEDULER__WORKER_TTL": "6s"})
    member = cluster.member()
    with cluster.client() as client:
        stop = threading.Event()
        signs = threading.Thread(target=give_signs, args=(client, stop))
        signs.start()
        try:
            wait_workers(client, "7-0", "7-1")
            before = client.run(os.getpid)
            for sig, pause_s in ((signal.SIGSTOP, 12), (signal.SIGCONT, 0)):
                for process in (head, member):
                    signal_job(process, sig)
                time.sleep(pause_s)  # longer than grace and worker-ttl: that is what is tested
            assert client.run(os.getpid) == before
            assert (head.poll(), member.poll()) == (None, None)
        finally:
            stop.set()
            signs.join()


def give_signs(client: Client, stop: threading.Event) -> None:
    while not stop.wait(0.3):
        client.sync(client.scheduler.hpcgpu_lease)


def signal_job(process: subprocess.Popen[str], sig: signal.Signals) -> None:
    """As a batch system does: to all processes of the job."""
    signal_all([process.pid, *(p.pid for p in psutil.Process(process.pid).children(recursive=True))], sig)


def test_a_detached_head_ends_when_a_client_is_back_and_silent(cluster: Ranks) -> None:
    lease.detach(cluster.folder)
    head = cluster.start("head", client_grace_s=1.0)
    with cluster.client() as client:
        with pytest.raises(subprocess.TimeoutExpired):
            head.wait(2.5)  # longer than the grace
        lease.take_up(cluster.folder)
        client.sync(client.scheduler.hpcgpu_lease)
    assert "has not been heard from for 1 s" in end_of(head)
    assert {"nonce", "scheduler"} & {p.name for p in cluster.folder.iterdir()} == set()  # no secret is left


def test_a_sign_of_life_under_way_does_not_end_a_detachment(cluster: Ranks) -> None:
    lease.detach(cluster.folder)  # before there is a scheduler, which has a grace of its own: a client may connect late
    head = cluster.start("head", client_grace_s=1.0)
    with cluster.client() as client:
        client.sync(client.scheduler.hpcgpu_lease, detach=True)
        client.sync(client.scheduler.hpcgpu_lease)  # it was sent before the detachment, and is read after it
        with pytest.raises(subprocess.TimeoutExpired):
            head.wait(4)  # longer than the grace and two looks
        client.sync(client.scheduler.hpcgpu_lease, goodbye=True)
    assert head.wait(DEADLINE_S) == 0


@pytest.mark.parametrize("shape", ["head", "member", "gang"])
def test_a_job_whose_client_is_long_gone_starts_nothing(cluster: Ranks, shape: str) -> None:
    lease.touch(cluster.folder)
    hour_ago = time.time() - 3600
    os.utime(cluster.folder / "lease", (hour_ago, hour_ago))
    assert "the client of this cluster is gone" in end_of(cluster.start(shape), 1)


def test_the_lease_is_held_by_touching_it(tmp_path: Path) -> None:
    assert lease.is_held(tmp_path, 1)  # nobody uses one here
    with pytest.raises(FileNotFoundError):
        lease.renew(tmp_path)
    assert list(tmp_path.iterdir()) == [], "a folder that is being removed stays without new files"
    lease.touch(tmp_path)
    assert lease.is_held(tmp_path, 5)
    os.utime(tmp_path / "lease", (1, 1))
    assert not lease.is_held(tmp_path, 5)
    lease.detach(tmp_path)
    assert lease.is_held(tmp_path, 5)
    assert not lease.is_held(tmp_path / "gone", 5)
    assert {p.name for p in tmp_path.iterdir()} == {"lease", "detached"}


def test_a_job_that_is_requeued_publishes_again(cluster: Ranks) -> None:
    job = {"PBS_JOBID": "7.server"}  # no variable of PBS says that it is another life
    first = cluster.start("head", env=job)
    assert cluster.published().restart_count == 0
    first.send_signal(signal.SIGTERM)
    assert first.wait(DEADLINE_S) == 128 + signal.SIGTERM
    assert scheduler_file.read(cluster.folder) is None
    cluster.start("head", env=job)
    assert cluster.published().restart_count == 1


def slurm_of(folder: Path, reason: str, scontrol: str = "") -> dict[str, str]:
    """Return the variables of a job whose Slurm ends it for this reason; it writes what it is asked for into asked."""
    for program, answer in (("squeue", f"echo '1:00:00|7|COMPLETING|0|N/A|node1|{reason}|'"), ("scontrol", scontrol)):
        (folder / program).write_text(f'#!/bin/sh\necho "$*" >> {folder}/asked\n{answer}\n')
        (folder / program).chmod(0o700)
    return {"SLURM_JOB_ID": "7", "PATH": f"{folder}:{os.environ['PATH']}"}


@pytest.mark.parametrize(("reason", "asked"), [("TimeLimit", ["requeue 7"]), ("None", [])])
def test_requeue_is_asked_for_when_time_is_over(cluster: Ranks, tmp_path: Path, reason: str, asked: list[str]) -> None:
    """As on a node so busy that the time before the limit was too short; a cancelled job ends."""
    head = cluster.start("head", env=slurm_of(tmp_path, reason), requeue=True, walltime_s=3600)
    cluster.published()
    head.send_signal(signal.SIGTERM)
    assert ("job 7 is requeued" in end_of(head, code=128 + signal.SIGTERM)) == bool(asked)
    assert re.findall("requeue.*", (tmp_path / "asked").read_text()) == asked


def test_requeue_is_asked_for_once_at_the_time_limit(cluster: Ranks, tmp_path: Path) -> None:
    """Slurm ends the job before scontrol ends; the job's time is over then."""
    head = cluster.start("head", env=slurm_of(tmp_path, "TimeLimit", "kill $PPID"), requeue=True)
    cluster.published()
    head.send_signal(signal.SIGUSR1)
    assert "job 7 is requeued" in end_of(head, code=128 + signal.SIGTERM)
    assert re.findall("requeue.*", (tmp_path / "asked").read_text()) == ["requeue 7"]
