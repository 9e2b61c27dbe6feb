"""The extras can be installed: there are versions of all that they name, and no stubs that refuse to be built."""

import os
import subprocess
import sys

import pytest
from paths import ROOT
from waiting import scaled

UNREACHABLE = ("client error (Connect)", "dns error", "timed out")


@pytest.mark.parametrize("cuda", ["12", "13"])
def test_the_extras_of_a_cuda_resolve_together(cuda: str) -> None:
    """Those which ``make`` installs nowhere: what all of them need is there for each alone."""
    words = ["pip", "compile", "--quiet", "--no-header", "--no-annotate", "--no-cache", "--python", sys.executable]
    of_cuda = "" if cuda == "12" else cuda
    extras = [word for extra in ("cupy", "rapids", "ucx") for word in ("--extra", f"{extra}{of_cuda}")]
    argv = [sys.executable, "-m", "uv", *words, "--extra", "jobqueue", *extras, "pyproject.toml"]
    certificates = {"SSL_CERT_FILE": bundle} if (bundle := os.environ.get("PIP_CERT")) else {}  # uv does not ask pip
    env = {**certificates, **os.environ}
    done = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, timeout=scaled(100), env=env)
    if any(words in done.stderr for words in UNREACHABLE):
        pytest.skip("no package index can be reached")
    assert done.returncode == 0, done.stderr
    found = dict(line.split(" ")[0].split("==") for line in done.stdout.splitlines())
    of_all = {f"{name}-cu{cuda}" for name in ("distributed-ucxx", "rmm", "cudf")}
    assert {*of_all, f"cupy-cuda{cuda}x", "cuda-core"} <= found.keys()
    assert found["cuda-bindings"].partition(".")[0] == cuda  # what torch and CuPy of this CUDA need, too
    assert "dask-cuda" not in found  # one of 2021 fits any Dask; today's pins one
    assert int(found["distributed"].partition(".")[0]) >= 2026
