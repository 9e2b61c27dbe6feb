"""The dashboard of a job's scheduler, from the login node on which its cluster object is: no ssh, no open port."""

from __future__ import annotations

import json
import textwrap

from lab import PATIENCE_S, Lab

CLUSTER = """
    import json, sys
    from hpcgpu import SLURMGPUCluster
    sys.stderr = sys.stdout
    with SLURMGPUCluster(nodes=1, gpus="sim:1") as cluster:
        print(json.dumps(cluster.dashboard_link), flush=True)
        sys.stdin.readline()
"""

# What a browser asks for, with the secret, with another one, without.
FETCH = """
    import sys, urllib.error, urllib.request
    url = sys.argv[1]
    root, secret = url.rsplit("/", 2)[:2]
    def status(url):
        try:
            with urllib.request.urlopen(url, timeout=60) as page:
                return page.status, "bokeh" in page.read().decode().lower()
        except urllib.error.HTTPError as e:
            return e.code, None
        except urllib.error.URLError as e:
            return str(e.reason), None
    print([status(u) for u in (url, f"{root}/status", f"{root}/{secret[::-1]}/status")])
"""


def test_the_link_leads_from_the_login_node_to_the_dashboard(slurm_lab: Lab) -> None:
    """As printed to a file: the line names a private file, which has the address."""
    slurm_lab.write("cluster.py", textwrap.dedent(CLUSTER))
    slurm_lab.write("fetch.py", textwrap.dedent(FETCH))
    cluster = slurm_lab.start(slurm_lab.login, ["python", "cluster.py"], PATIENCE_S * 2)
    try:
        before: list[str] = []
        while not (line := cluster.stdout.readline()).startswith('"'):
            assert line, f"no cluster: {before}"
            before.append(line.strip())
        link = json.loads(line)
        (shown,) = [text for text in before if "dashboard: " in text]
        assert link.split("/")[3] not in "".join(before)
        way = shown.removeprefix("hpcgpu: dashboard: ").split()
        assert slurm_lab.exec(slurm_lab.login, way, check=True).stdout.strip() == link
        done = slurm_lab.exec(slurm_lab.login, ["python", "fetch.py", link])
        assert done.stdout == "[(200, True), (404, None), (404, None)]\n", done.stdout + done.stderr
        elsewhere = slurm_lab.exec(slurm_lab.nodes[0], ["python", "fetch.py", link])
        assert "200" not in elsewhere.stdout  # it is this machine's loopback alone
    finally:
        out, err = cluster.communicate("\n", timeout=PATIENCE_S)
    assert cluster.returncode == 0, out + err
