"""Who may talk to a cluster, what listens, and where secrets stand."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import ranks

pytestmark = pytest.mark.mpi

# run as the cluster's script: what a neighbour on the node can see and do, and what is secret
LOOK = """
    import json, pathlib, subprocess, urllib.request, urllib.error, psutil
    c = Client()
    leader = psutil.Process(os.getppid())
    family = [leader, *leader.children(recursive=True)]
    sockets = [(p.pid, x.laddr.ip, x.laddr.port) for p in family for x in p.net_connections() if x.status == "LISTEN"]
    scheduler = c.run_on_scheduler(os.getpid)
    workers = list(c.run(os.getpid).values())
    folder = pathlib.Path(os.environ["DASK_DISTRIBUTED__COMM__TLS__CLIENT__KEY"]).parent
    url = (folder / "dashboard").read_text().strip()
    key = (folder / "client.key").read_text().split("\\n")[1]

    def status(url):
        try:
            return urllib.request.urlopen(url, timeout=10).status
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
    facts = dict(leader=leader.pid, scheduler=scheduler, workers=workers, sockets=sockets, pages=pages,
                 own=status(url), strangers=strangers, secret=url.split("/")[3], key=key, seen=seen, url=url,
                 modes=[oct(p.stat().st_mode & 0o777) for p in folder.iterdir() if p.is_file()],
                 address=c.scheduler.address, shown=repr(c) + c._repr_html_())
    pathlib.Path(sys.argv[1]).write_text(json.dumps(facts))
"""


@pytest.fixture(scope="module")
def look(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    folder = tmp_path_factory.mktemp("look")
    done = ranks.run(ranks.script(folder, LOOK), str(folder / "facts"), ranks=3)
    assert done.returncode == 0, done.stderr
    return {**json.loads((folder / "facts").read_text()), "said": done.stdout + done.stderr}


def test_a_client_without_certificate_is_refused(look: dict) -> None:
    assert look["address"].startswith("tls://")
    for code, said in look["strangers"]:
        assert code != 0
        assert re.search(r"(CommClosedError|OSError|SSLError)", said), said


def test_nothing_else_listens(look: dict) -> None:
    """docs/security.md: one socket for each worker, nanny and scheduler; the dashboard on loopback."""
    owners = sorted(pid for pid, _, _ in look["sockets"])
    assert owners == sorted([look["leader"]] * 2 + [look["scheduler"]] * 2 + look["workers"])
    assert {ip for _, ip, _ in look["sockets"]} == {"127.0.0.1"}


def test_the_dashboard_answers_only_to_who_knows_its_secret(look: dict) -> None:
    assert set(look["pages"].values()) == {404}
    assert look["own"] == 200


def test_secrets_stand_in_private_files_only(look: dict) -> None:
    assert len(look["key"]) > 40
    assert len(look["secret"]) > 20
    for secret in (look["key"], look["secret"]):
        assert secret not in look["said"]
        assert secret not in look["shown"]
        assert not [words for words in look["seen"] if secret in words]
    assert set(look["modes"]) <= {"0o600"}


def test_the_dashboards_address_is_where_it_was_said(look: dict) -> None:
    found = re.search(r"the dashboard's address: cat (\S+)", look["said"])
    assert found
    assert not Path(found[1]).exists()  # gone with the run


def test_without_tls_it_is_said(tmp_path: Path) -> None:
    path = ranks.script(tmp_path, "c = Client()\nprint(c.scheduler.address.split(':')[0])")
    done = ranks.run(path, options=("--gpus", "sim:1", "--no-security"))
    assert (done.returncode, done.stdout) == (0, "tcp\n")
    assert "not encrypted" in done.stderr
