"""``make`` shows that an installation goes on; programs in place of Python's print what pip prints."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from paths import ROOT
from waiting import scaled

# In place of the Python that makes the environment, and of the one in it.
PYTHON = """#!/bin/bash
case "$*" in
  "-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; printf '#!/bin/sh\\n' > "$3/bin/hpcgpu"
               chmod +x "$3/bin/hpcgpu" ;;
  "-m pip "*)  echo 'Collecting numpy>=1.24 (from hpcgpu)'
               [ "$PIP_GOES_ON" = on ] || { echo 'ERROR: No matching distribution' >&2; exit 1; }
               echo 'Collecting dask[array]~=2026.8; python_version > "3"'
               echo 'Installing collected packages: numpy, dask' ;;
esac
"""


def test_an_installation_shows_that_it_goes_on_and_how_to_use_it(tmp_path: Path) -> None:
    python, venv = tmp_path / "python", tmp_path / "venv"
    python.write_text(PYTHON)
    python.chmod(0o755)
    argv = ["make", "--no-print-directory", "demo", f"VENV={venv}", f"PYTHON={python}"]

    def make(pip: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "PIP_GOES_ON": pip, "MAKEFLAGS": ""}
        return subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, env=env, timeout=scaled(60))

    failed = make("no")
    assert (failed.returncode, (venv / ".installed").exists()) == (2, False)
    assert "pip could not install the packages (its words are above)" in failed.stderr
    done = make("on")
    assert (done.returncode, " numpy dask\n" in done.stdout) == (0, True)
    assert done.stdout.endswith(f"On your own: . {venv}/bin/activate; hpcgpu run --gpus sim:4 examples/svd.py\n")
