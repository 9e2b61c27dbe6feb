"""Who may talk to a cluster, what listens, and where secrets stand."""

import asyncio
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import psutil
import pytest
import ranks
import sockets
from distributed import Client
from sockets import Listening
from waiting import scaled, until

from hpcgpu import LocalGPUCluster
from hpcgpu.agent.missing_ranks import TITLE
from hpcgpu.deploy.network.dashboard import Tunnel
from hpcgpu.host import process

# run as the cluster's script: what a neighbour on the node can see and do, and what is secret
LOOK = """
    import json, pathlib, subprocess, urllib.request, urllib.error, psutil
    c = Client()
    leader = psutil.Process(os.getppid())
    family = [leader, *leader.children(recursive=True)]
    sys.path.insert(0, sys.argv[2])
    import sockets
    mpirun = leader.parent()
    everybody = [mpirun, *mpirun.children(recursive=True)]
    listening = [(p.pid, *found) for p in everybody for found in sockets.of(p.pid)]
    scheduler = c.run_on_scheduler(os.getpid)
    workers = list(c.run(os.getpid).values())
    folder = pathlib.Path(os.environ["DASK_DISTRIBUTED__COMM__TLS__CLIENT__KEY"]).parent
    url = (folder / "dashboard").read_text().strip()
    key = (folder / "client.key").read_text().split("\\n")[1]

    def status(url):
        try:
            return urllib.request.urlopen(url, timeout=60).status
        except urllib.error.HTTPError as e:
            return e.code

    root = url.split("/")[2]
    paths = ("/", "/status", "/info/main/workers.html", "/sitemap.json", "/metrics")
    pages = {p: status(f"http://{root}{p}") for p in paths}

    def knock(address, security):
        code = f"from distributed import Client, Security; Client({address!r}, timeout=5, security={security})"
        clean = {k: v for k, v in os.environ.items() if not k.startswith("DASK_")}
        done = subprocess.run([sys.executable, "-c", code], env=clean, capture_output=True, text=True)
        return done.returncode, done.stderr

    tls = c.scheduler.address
    strangers = [knock(tls.replace("tls", "tcp"), "Security()"), knock(tls, "Security.temporary()")]
    seen = [" ".join(p.cmdline()) + " " + " ".join(f"{k}={v}" for k, v in p.environ().items()) for p in family]
    facts = dict(leader=leader.pid, scheduler=scheduler, workers=workers, listening=listening, pages=pages,
                 mpirun=mpirun.pid,
                 own=status(url), strangers=strangers, secret=url.split("/")[3], key=key, seen=seen, url=url,
                 modes=[oct(p.stat().st_mode & 0o777) for p in folder.iterdir() if p.is_file()],
                 address=c.scheduler.address, shown=repr(c) + c._repr_html_())
    pathlib.Path(sys.argv[1]).write_text(json.dumps(facts))
"""
# Run as the cluster's script, too: a neighbour on the node needs no certificate to open connections.
FLOOD = """
    import contextlib, pathlib, resource, socket, urllib.parse
    resource.setrlimit(resource.RLIMIT_NOFILE, (2048, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    c = Client()
    identity = c.scheduler_info()
    (worker, facts), = identity["workers"].items()
    dashboard = (pathlib.Path(os.environ["DASK_DISTRIBUTED__COMM__TLS__CLIENT__KEY"]).parent / "dashboard").read_text()
    addresses = [c.scheduler.address, worker, facts["nanny"], dashboard]
    listeners = [urllib.parse.urlsplit(address)[1].split(":") for address in addresses]
    flood = [socket.create_connection((host, int(port))) for host, port in listeners for _ in range(400)]
    fresh = Client(timeout=60)
    assert fresh.submit(sum, [1, 2, 3]).result(60) == 6
    for sock in flood:
        sock.settimeout(60)
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(1) == b""
"""


@pytest.fixture(scope="module")
def look(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    folder = tmp_path_factory.mktemp("look")
    arguments = (str(folder / "facts"), str(Path(sockets.__file__).parent))
    done = ranks.run(ranks.script(folder, LOOK), *arguments, ranks=3, timeout=scaled(150))
    assert done.returncode == 0, done.stderr
    return {**json.loads((folder / "facts").read_text()), "said": done.stdout + done.stderr}


def test_a_client_without_certificate_is_refused(look: dict) -> None:
    assert look["address"].startswith("tls://")
    for code, said in look["strangers"]:
        assert code != 0
        assert re.search(r"(CommClosedError|OSError|SSLError)", said), said


def test_nothing_else_listens(look: dict) -> None:
    """One TCP socket for each worker, nanny and scheduler, the dashboard, the leader's socket; mpirun's own."""
    found = [(pid, Listening(*where)) for pid, *where in look["listening"]]
    ours = Counter((pid, where) for pid, where in found if pid != look["mpirun"])
    tcp, own = Listening("TCP", "loopback"), Listening("unix", "`leader`")
    assert ours == {
        **{(pid, tcp): 1 for pid in look["workers"]},
        (look["scheduler"], tcp): 2,
        (look["leader"], tcp): 2,
        (look["leader"], own): 1,
    }
    assert tcp in sockets.documented("worker") & sockets.documented("scheduler") & sockets.documented("leader rank")
    assert own in sockets.documented("leader rank")
    launchers = {where for pid, where in found if pid == look["mpirun"]}
    assert launchers <= sockets.documented("mpirun")


def test_ranks_that_meet_listen_as_documented(tmp_path: Path) -> None:
    """One rank stays away, so that the others wait in MPI."""
    keep = f'if [ "$OMPI_COMM_WORLD_RANK" = 2 ]; then exec cat {tmp_path}/never; fi; exec "$@"'
    os.mkfifo(tmp_path / "never")
    rank = ranks.command(ranks.script(tmp_path, ""), options=("--gpus", "sim:2"))
    argv = [*ranks.MPIRUN, "-n", "3", "bash", "-c", keep, "bash", *rank]
    env = ranks.environment(TMPDIR=str(tmp_path))
    with subprocess.Popen(argv, env=env, stderr=subprocess.DEVNULL) as mpirun:
        family = psutil.Process(mpirun.pid)

        def waiting() -> list[int]:
            return [p.pid for p in family.children() if process.title(p.pid) == TITLE]

        try:
            until(lambda: len(waiting()) == 2, "both ranks are at the rendezvous")
            leader, follower = sorted(waiting())
            listening = {Listening("TCP", "all interfaces")} & sockets.documented("any rank under MPI")
            until(lambda: listening <= set(sockets.of(follower)), "the follower listens")
            assert set(sockets.of(follower)) == listening
            assert set(sockets.of(leader)) <= listening | {Listening("unix", "`leader`")}
        finally:
            mpirun.terminate()
            mpirun.wait(scaled(30))


def test_a_tunnel_listens_on_loopback() -> None:
    async def listening() -> list[Listening]:
        before = Counter(sockets.of(os.getpid()))
        tunnel = await Tunnel.open((sys.executable, "-m", "hpcgpu.host.relay", "1"))
        try:
            return list((Counter(sockets.of(os.getpid())) - before).elements())
        finally:
            await tunnel.close()

    (found,) = asyncio.run(listening())
    assert {found} == sockets.documented("process of the cluster object")


def test_secrets_stand_in_private_files_only(look: dict) -> None:
    assert set(look["pages"].values()) == {404}  # the dashboard answers only to who knows its secret
    assert look["own"] == 200
    assert len(look["key"]) > 40
    assert len(look["secret"]) > 20
    for secret in (look["key"], look["secret"]):
        assert secret not in look["said"]
        assert secret not in look["shown"]
        assert not [words for words in look["seen"] if secret in words]
    assert set(look["modes"]) <= {"0o600"}
    found = re.search(r"dashboard: its address is in (\S+)", look["said"])
    assert found
    assert not Path(found[1]).exists()  # gone with the run


@pytest.mark.parametrize("launcher", ["fork", "mpirun"])
def test_values_of_env_stand_in_no_command(launcher: str) -> None:
    """Every user of a node can read the words of commands."""
    secret = "postgres://u:hunter2@db/x,y;z=1 'quoted'"
    with LocalGPUCluster(gpus="sim:1", launcher=launcher, env={"DB_URL": secret}, dashboard=False) as cluster:
        ranks_ = psutil.Process(int(cluster.job_id))
        with Client(cluster) as client:
            assert client.submit(os.getenv, "DB_URL").result() == secret
            assert client.submit(os.getenv, "HPCGPU_DOCUMENT").result() is None
        commands = [" ".join(p.cmdline()) for p in [ranks_, *ranks_.children(recursive=True)]]
    assert len(commands) >= 3
    assert not [command for command in commands if "hunter2" in command]


def test_without_tls_it_is_said(tmp_path: Path) -> None:
    path = ranks.script(tmp_path, "c = Client()\nprint(c.scheduler.address.split(':')[0])")
    done = ranks.run(path, options=("--gpus", "sim:1", "--no-security"))
    assert (done.returncode, done.stdout) == (0, "tcp\n")
    assert "not encrypted" in done.stderr


def test_every_file_of_a_run_is_private(tmp_path: Path) -> None:
    """While a cluster object has its cluster: on the node, and in the folder where both find each other."""
    code = """
        from hpcgpu import LocalGPUCluster
        def entries():
            for home in sys.argv[1:]:
                for folder, folders, files in os.walk(home):
                    yield from (os.path.join(folder, name) for name in (*folders, *files))
        if __name__ == "__main__":
            with LocalGPUCluster(gpus="sim:1") as cluster, Client(cluster) as client:
                assert client.submit(sum, [1, 2]).result() == 3
                for path in entries():
                    print(oct(os.lstat(path).st_mode & 0o777), path)
    """
    homes = [tmp_path / "home", tmp_path / "tmp"]
    for home in homes:
        home.mkdir()
    argv = ["bash", "-c", 'umask 000; exec "$@"', "bash", sys.executable, str(ranks.script(tmp_path, code))]
    done = ranks.run_command([*argv, *map(str, homes)], {"HOME": str(homes[0]), "TMPDIR": str(homes[1])})
    assert done.returncode == 0, done.stderr
    modes = {line.partition(" ")[2]: line.partition(" ")[0] for line in done.stdout.splitlines()}
    assert {Path(path).name for path in modes} >= {"lease", "scheduler", "nonce", "leader"}
    closed = tuple(f"{path}/" for path, mode in modes.items() if mode == "0o700")
    assert [path for path, mode in modes.items() if mode[-2:] != "00" and not path.startswith(closed)] == []
    assert {mode for path, mode in modes.items() if Path(path).name in ("scheduler", "nonce", "progress")} == {"0o600"}


def test_half_open_connections_are_closed_for_new_clients(tmp_path: Path) -> None:
    limited = ranks.command(ranks.script(tmp_path, FLOOD), options=("--gpus", "sim:1"))
    env = {"DASK_DISTRIBUTED__COMM__TIMEOUTS__HANDSHAKE": "3s"}
    done = ranks.run_command(["bash", "-c", 'ulimit -Sn 256; exec "$@"', "bash", *limited], env=env)
    assert done.returncode == 0, done.stderr
    assert len(done.stderr) < 10_000, done.stderr[:10_000]
    assert "connections without a handshake" in done.stderr
