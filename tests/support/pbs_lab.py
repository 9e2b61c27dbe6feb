"""A real OpenPBS in namespaces of this machine as an object: what runs on its machines, and what breaks them.

It is another project's: ``HPCGPU_PBS_LAB`` is its folder, else ``../shared/pbs-lab`` beside the checkout.
"""

import contextlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from clients import LOOP, Client
from paths import ROOT
from waiting import until

PYTHON = ROOT / ".venv/bin/python" if (ROOT / ".venv/bin/python").exists() else Path(sys.executable)
HOME = Path("/home/labuser")
# The checkout and its Python are shared by all machines of the lab; what lies in a folder that only root may enter, as
# /root, is shown again in one that everybody may.
EXPOSE = """
set -e
for path in "$@"; do
    i=$((i + 1)); keep=/run/hpcgpu/$i
    [ ! -d "$keep" ] || continue
    mkdir -p "$keep"; mount --rbind "$path" "$keep"
    shut= p=$path
    while [ "$p" != / ]; do p=$(dirname "$p"); [ "$((0$(stat -c %a "$p") & 1))" = 1 ] || shut=$p; done
    [ -z "$shut" ] || { mount -t tmpfs -o mode=755 tmpfs "$shut"; mkdir -p "$path"; mount --rbind "$keep" "$path"; }
done
"""


class PbsLabUnavailable(Exception):
    """It cannot be had on this machine; the text says why."""


class PbsLab:
    """The login node, four nodes, and what runs on them."""

    nodes = ("node1", "node2", "node3", "node4")
    python = PYTHON
    template = ROOT / "jobscripts" / "pbs.sh"

    def __init__(self, state: Path) -> None:
        folder = Path(os.environ.get("HPCGPU_PBS_LAB") or ROOT.parent / "shared" / "pbs-lab")
        if not (folder / "up.sh").exists():
            raise PbsLabUnavailable(f"no OpenPBS lab in {folder}; HPCGPU_PBS_LAB names its folder")
        if os.getuid() != 0:
            raise PbsLabUnavailable("it needs root for its namespaces")
        up = Path("/run/pbs-lab.dir")
        if up.exists() and (used := up.read_text().strip()):
            raise PbsLabUnavailable(f"one is up already, in {used}: PBSLAB_RUN={used} {folder}/down.sh")
        self._folder, self._broken = folder, False
        self._shown = [str(ROOT), str(Path(sys.base_prefix).resolve())]
        self._env = {**os.environ, "PBSLAB_RUN": str(state), "PBSLAB_SHARE": ":".join(self._shown)}
        self._env["PBSLAB_NODES"] = str(len(self.nodes))

    def run(self, program: str, *words: str, limit_s: float = 120) -> str:
        """Run one of the lab's programs; return its output."""
        options: dict[str, Any] = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL, "env": self._env}
        done = subprocess.run([self._folder / program, *words], timeout=limit_s, **options)
        assert done.returncode == 0, f"{program} {shlex.join(words)}: {done.stdout}{done.stderr}"
        return done.stdout

    def up(self) -> None:
        """Start it."""
        try:
            try:
                self.run("up.sh", str(len(self.nodes)), limit_s=400)
            except AssertionError:  # its database gives up early on a machine that is busy
                self.run("up.sh", str(len(self.nodes)), limit_s=400)
        except AssertionError as e:
            raise PbsLabUnavailable(str(e)[:500]) from e
        for machine in ("login01", *self.nodes):
            self._expose(machine)

    def mend(self) -> None:
        """Mend what a test has broken."""
        if self._broken:
            self.breaks("epilogue", "none")
            self.up()
        self._broken = False

    def down(self) -> None:
        """Remove it."""
        self.run("down.sh", "--wipe")

    def _expose(self, machine: str) -> None:
        self.on(machine, f"bash -c {shlex.quote(EXPOSE)} x {shlex.join(self._shown)}", user="root")

    def breaks(self, verb: str, *words: str) -> None:
        """Break a machine, or mend it: ``off node2``."""
        self._broken = True
        self.run("plab.sh", verb, *words)
        if verb == "on":
            self._expose(words[0])

    def on(self, machine: str, line: str, user: str = "labuser") -> str:
        """Run a shell line on a machine; return its output."""
        return self.run("on", machine, "-u", user, line)

    def hpcgpu(self, *words: str) -> str:
        """Run a command of ours on the login node; return what it printed."""
        return self.on("login01", shlex.join([str(PYTHON), "-m", "hpcgpu", *words]))

    @contextlib.contextmanager
    def client(self) -> Iterator[Client]:
        """A Python on the login node, which has imported what a client needs."""
        line = f"mkdir -p work; cd work; exec {PYTHON} -c {shlex.quote(LOOP)}"
        client = Client([self._folder / "on", "login01", line], env=self._env)
        try:
            client("from pathlib import Path; from distributed import Client; from hpcgpu import PBSGPUCluster")
            yield client
        finally:
            client.end()

    def kill(self, client: Client) -> None:
        """Kill a client."""
        self.on("login01", f"kill -9 {client.pid}")

    def states(self) -> dict[str, str]:
        """Return the state of each job that has not ended; elements for their array."""
        jobs = json.loads(self.on("login01", "qstat -t -f -F json")).get("Jobs", {})
        return {i: job["job_state"] for i, job in jobs.items() if "[]" not in i and job["job_state"] not in "FX"}

    def node_of(self, job_id: str) -> str:
        """Return the first node of a running job."""
        jobs = json.loads(self.on("login01", f"qstat -t -f -F json '{job_id}'"))["Jobs"]
        return str(jobs[job_id]["exec_host"].partition("/")[0])

    def processes(self) -> list[str]:
        """Return the processes of the lab's user, but for shells that wait for a job."""
        ps = {m: self.on(m, "ps -u labuser -o pid=,args= || :", user="root") for m in ("login01", *self.nodes)}
        lines = [f"{machine}: {line}" for machine, text in ps.items() for line in text.splitlines()]
        return [line for line in lines if "hpcgpu" in line or "python" in line]

    def run_folders(self) -> list[Path]:
        """Return the folders of all runs."""
        runs = HOME / ".hpcgpu" / "runs"
        return sorted(runs.iterdir()) if runs.is_dir() else []

    def left(self) -> list[str]:
        """Return what is there of runs: jobs, else folders, else processes, which are a ps on each machine."""
        jobs = [f"job {i} is {state}" for i, state in self.states().items()]
        return jobs or [*map(str, self.run_folders())] or self.processes()

    def wait_idle(self, limit_s: float = 60) -> None:
        """Return when nothing is left of any run."""
        until(lambda: not self.left(), "nothing is left on the lab", limit_s=limit_s, every_s=1, shown=self.left)
