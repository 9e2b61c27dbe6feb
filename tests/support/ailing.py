"""What ails a job of the doctor as its prologue brings it, from files in the home, and how its findings are checked."""

import base64
import io
import json
import shlex
import tarfile
from pathlib import Path

import fakesys
from fake_nvml import compile_library
from paths import ROOT

Found = dict[str, dict[str, str]]
LONG = f"/tmp/{'x' * 115}"  # 120 bytes
OLD_DASK = "2025.1.0"
LATE_S = -90


def tarball(folder: Path) -> str:
    """Return in base64 a machine as it was recorded, with dead ports; a wrong clock; an older Dask's metadata."""
    fakesys.build("drm-4gpu", folder / "machine")
    compile_library(ROOT / "tests" / "support" / "fake_clock.c", folder / "fake_clock.so")
    info = folder / "old" / f"dask-{OLD_DASK}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: dask\nVersion: {OLD_DASK}\n")
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        tar.add(folder, arcname=".")
    return base64.b64encode(out.getvalue()).decode()


def prologue(folder: str, late: str) -> str:
    """Return lines of a job's script: limits, variables and a clock that is wrong on the node ``late``."""
    variables = {
        **fakesys.environment(Path(folder, "machine")),
        "TMPDIR": LONG,
        "PYTHONPATH": f"{folder}/old",
        "LD_PRELOAD": f"{folder}/fake_clock.so",
        "FAKE_CLOCK": f"{late}:{LATE_S}",
    }
    exports = "; ".join(f"export {name}={shlex.quote(value)}" for name, value in variables.items())
    return f"mkdir -p {LONG}; ulimit -l 64; {exports}"


def check_prepared(findings: Found) -> None:
    """Fail unless ten prepared faults have their verdicts and advice."""
    check(findings, "node to node", "failed", "node1 to node2 at ", "timed out", "firewall")
    check(findings, "versions", "failed", f"{OLD_DASK} on node1", "--python")
    check(findings, "scratch of the nodes", "failed", "node2: /dev/shm (tmpfs)", "full", "--local-directory")
    check(findings, "locked memory in the job", "warning", "64.0 KiB of memory may be locked", "memlock unlimited")
    check(findings, "network ports", "warning", "is down, nearest to the GPU at", "UCX_NET_DEVICES")
    check(findings, "launcher and MPI", "failed", "--rendezvous file")
    check(findings, "GPUs", "failed", "node1 shows 0 of 1 GPUs", "--queue", "hpcgpu plan")
    check(findings, "CPUs", "warning", "node1: 1 of ", "--cores-per-gpu")
    check(findings, "clocks", "warning", "the clock of ", "chronyd")
    check(findings, "socket paths", "warning", "node1: TMPDIR has 120 bytes", "export TMPDIR=/tmp")


def read(text: str) -> Found:
    """Return the findings of ``hpcgpu doctor --json``, by the names of their checks."""
    return {finding["name"]: finding for finding in json.loads(text)["findings"]}


def check(findings: Found, name: str, verdict: str, *texts: str) -> None:
    """Fail unless the check has that verdict, and says these words."""
    finding = findings[name]
    assert finding["verdict"] == verdict, finding
    for word in texts:
        assert word in f"{finding['seen']} | {finding['advice']}", finding
