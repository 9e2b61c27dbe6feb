"""The dashboard of a job's scheduler, from the login node on which its cluster object is: no ssh, no open port."""

import re
import textwrap

from lab import Lab

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
    slurm_lab.write("fetch.py", textwrap.dedent(FETCH))
    with slurm_lab.client() as client:
        client('cluster = SLURMGPUCluster(nodes=1, gpus="sim:1")')
        link = client("cluster.dashboard_link")
        assert link.split("/")[3] not in client.said
        (file,) = re.findall(r"dashboard: its address is in (\S+)", client.said)
        assert slurm_lab.exec(slurm_lab.login, ["cat", file], check=True).stdout.strip() == link
        done = slurm_lab.exec(slurm_lab.login, ["python", "fetch.py", link])
        assert done.stdout == "[(200, True), (404, None), (404, None)]\n", done.stdout + done.stderr
        elsewhere = slurm_lab.exec(slurm_lab.nodes[0], ["python", "fetch.py", link])
        assert "200" not in elsewhere.stdout  # it is this machine's loopback alone
        client("cluster.close()")
