"""What ``make`` says while it installs, with programs in place of Python's that say what pip says."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from paths import ROOT

# In place of the Python that makes the environment, and of the one in it.
PYTHON = """#!/bin/bash
case "$*" in
  "-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; printf '#!/bin/sh\\n' > "$3/bin/hpcgpu"
               chmod +x "$3/bin/hpcgpu" ;;
  "-m pip "*)  echo 'Obtaining file:///checkout'; echo 'Collecting numpy>=1.24 (from hpcgpu)'
               read -r go < "$PIP_GOES_ON"; [ "$go" = on ] || { echo 'ERROR: No matching distribution' >&2; exit 1; }
               echo 'Collecting dask[array]~=2026.8; python_version > "3"'
               echo 'Installing collected packages: numpy, dask' ;;
esac
"""


@pytest.mark.parametrize(("go", "code"), [("on", 0), ("no", 2)])
def test_an_installation_shows_that_it_goes_on_and_how_to_use_it(tmp_path: Path, go: str, code: int) -> None:
    python, venv, fifo = tmp_path / "python", tmp_path / "venv", tmp_path / "fifo"
    python.write_text(PYTHON)
    python.chmod(0o755)
    os.mkfifo(fifo)
    argv = ["make", "--no-print-directory", "demo", f"VENV={venv}", f"PYTHON={python}"]
    env = {**os.environ, "PIP_GOES_ON": str(fifo), "MAKEFLAGS": ""}
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdout=pipe, stderr=pipe, text=True, cwd=ROOT, env=env, process_group=0) as make:
        try:
            assert make.stdout
            assert make.stderr
            said = ""
            while not said.endswith(" numpy"):  # while pip works
                letter = make.stdout.read(1)
                assert letter, said + make.stderr.read()
                said += letter
            fifo.write_text(f"{go}\n")
            said, wrong = said + make.stdout.read(), make.stderr.read()
        except BaseException:
            os.killpg(make.pid, signal.SIGKILL)
            raise
    assert make.returncode == code
    if code:
        assert "ERROR: No matching distribution" in wrong
        assert "pip could not install the packages (its words are above)" in wrong
        assert not (venv / ".installed").exists()
    else:
        assert " numpy dask\n... all are here, and are put into place\n" in said
        assert f"installed. In your shell: . {venv}/bin/activate\n" in said
        assert said.endswith(f"On your own: . {venv}/bin/activate; hpcgpu run --gpus sim:4 examples/svd.py\n")
