"""Connections whose peers never say who they are: a neighbour on the node needs no certificate to open them."""

from __future__ import annotations

import json
from pathlib import Path

import ranks

# Run as the cluster's script, for any process of the node can do the same.
FLOOD = """
    import json, pathlib, resource, socket, urllib.parse
    resource.setrlimit(resource.RLIMIT_NOFILE, (2048, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    c = Client()
    identity = c.scheduler_info()
    (worker, facts), = identity["workers"].items()
    dashboard = (pathlib.Path(os.environ["DASK_DISTRIBUTED__COMM__TLS__CLIENT__KEY"]).parent / "dashboard").read_text()
    addresses = [c.scheduler.address, worker, facts["nanny"], dashboard]
    listeners = [urllib.parse.urlsplit(address)[1].split(":") for address in addresses]
    flood = [socket.create_connection((host, int(port))) for host, port in listeners for _ in range(400)]
    fresh = Client(timeout=60)
    result = fresh.submit(sum, [1, 2, 3]).result(60)
    ends = []
    for sock in flood:
        sock.settimeout(60)
        try:
            ends.append(sock.recv(1).hex())
        except ConnectionResetError:
            ends.append("")
    pathlib.Path(sys.argv[1]).write_text(json.dumps([result, ends]))
"""


def test_half_open_connections_close_and_new_clients_come_in(tmp_path: Path) -> None:
    path = ranks.script(tmp_path, FLOOD)
    limited = ranks.command(path, str(tmp_path / "facts"), options=("--gpus", "sim:1"))
    env = {"DASK_DISTRIBUTED__COMM__TIMEOUTS__HANDSHAKE": "3s"}
    done = ranks.run_command(["bash", "-c", 'ulimit -Sn 256; exec "$@"', "bash", *limited], env=env)
    assert done.returncode == 0, done.stderr
    result, ends = json.loads((tmp_path / "facts").read_text())
    assert result == 6
    assert ends == [""] * 1600
    assert len(done.stderr) < 10_000, done.stderr[:10_000]
    assert "connections without a handshake" in done.stderr
