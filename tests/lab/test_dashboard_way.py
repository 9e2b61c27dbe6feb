"""The dashboard from somewhere else: the ``ssh -L`` line that a cluster prints is run as it stands."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator

import pytest
from lab import Lab

PATIENCE_S = 150
SSHD = "test -e /run/sshd/sshd.pid || { mkdir -p /run/sshd && /usr/sbin/sshd -o PidFile=/run/sshd/sshd.pid; }"
NO_SSHD = "test ! -e /run/sshd/sshd.pid || kill $(cat /run/sshd/sshd.pid)"
KEY = "umask 077; mkdir .ssh; cd .ssh; ssh-keygen -q -t ed25519 -N '' -f id_ed25519; cp id_ed25519.pub authorized_keys"
CONFIG = "Host *\n  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n"

CLUSTER = """
    import json, sys
    from hpcgpu import SLURMGPUCluster
    sys.stderr = sys.stdout
    with SLURMGPUCluster(nodes=1, gpus="sim:1") as cluster:
        said = [line for line in cluster.explain().splitlines() if line.startswith("dashboard: ")]
        print(json.dumps([cluster.dashboard_url(), *said]), flush=True)
        sys.stdin.readline()
"""

# What a browser asks for, with the secret, with another one, without; waits until the way is open.
FETCH = """
    import sys, time, urllib.error, urllib.request
    url = sys.argv[1]
    root, secret = url.rsplit("/", 2)[:2]
    end = time.monotonic() + 60
    def status(url):
        while time.monotonic() < end:
            try:
                with urllib.request.urlopen(url, timeout=30) as page:
                    return page.status, "bokeh" in page.read().decode().lower()
            except urllib.error.HTTPError as e:
                return e.code, None
            except urllib.error.URLError:
                time.sleep(0.1)
    print([status(u) for u in (url, f"{root}/status", f"{root}/{secret[::-1]}/status")])
"""


@pytest.fixture
def ssh(slurm_lab: Lab) -> Iterator[Lab]:
    """The lab with ssh from each machine to each, for its user."""
    machines = (slurm_lab.login, *slurm_lab.nodes)
    slurm_lab.exec(slurm_lab.login, ["rm", "-rf", ".ssh"], check=True)
    slurm_lab.exec(slurm_lab.login, ["sh", "-c", KEY], check=True)
    slurm_lab.write(".ssh/config", CONFIG)
    slurm_lab.exec(slurm_lab.login, ["chmod", "600", ".ssh/config"], check=True)
    for machine in machines:
        slurm_lab.exec(machine, ["sh", "-c", SSHD], user="root", check=True)
    yield slurm_lab
    for machine in machines:
        slurm_lab.exec(machine, ["sh", "-c", NO_SSHD], user="root", check=True)
    slurm_lab.exec(slurm_lab.login, ["rm", "-r", ".ssh"], check=True)


def fetch_through(lab: Lab, machine: str, way: str, url: str) -> str:
    """Return what the dashboard answers on a machine while the ``ssh`` line runs there."""
    wrapped = ["sh", "-c", '"$@" & pid=$!; read -r _; kill $pid; wait $pid', "sh", *way.split()]
    tunnel = lab.start(machine, wrapped, PATIENCE_S)
    try:
        done = lab.exec(machine, ["python", "fetch.py", url], timeout=PATIENCE_S / 2)
    finally:
        out, err = tunnel.communicate("\n", timeout=PATIENCE_S)
    return done.stdout + done.stderr + out + err


def test_the_printed_line_leads_to_the_dashboard(ssh: Lab) -> None:
    """From the login node as it stands, and from outside with -J."""
    ssh.write("cluster.py", textwrap.dedent(CLUSTER))
    ssh.write("fetch.py", textwrap.dedent(FETCH))
    cluster = ssh.start(ssh.login, ["python", "cluster.py"], PATIENCE_S * 2)
    assert cluster.stdout
    try:
        before = []
        for line in cluster.stdout:
            if line.startswith("["):
                break
            before.append(line.strip())
        else:
            raise AssertionError(f"no cluster: {before} {cluster.communicate()[1]}")
        url, explained = json.loads(line)
        said = [text for text in before if "dashboard: " in text]
        assert said == [f"hpcgpu: {explained}"]  # once, when it is up
        assert url.split("/")[3] not in "".join(before)
        way = explained.removeprefix("dashboard: ").partition(" (")[0]
        outside = next(node for node in reversed(ssh.nodes) if node not in way)
        for machine, line in ((ssh.login, way), (outside, way.replace("ssh ", f"ssh -J {ssh.login} "))):
            seen = fetch_through(ssh, machine, line, url)
            assert seen.startswith("[(200, True), (404, None), (404, None)]\n"), f"{line}: {seen}"
    finally:
        out, err = cluster.communicate("\n", timeout=PATIENCE_S)
    assert cluster.returncode == 0, out + err
