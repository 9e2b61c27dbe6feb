"""A Jupyter server beside the cluster of this job: ``distributed.Client()`` in a notebook is a client of the cluster.

The templates slurm-jupyter.sbatch and pbs-jupyter.sh run it as the cluster's script, and so may you:
hpcgpu launch notebook_server.py [options of the server]
With an option --config=FILE, address and token are that file's, as for Open OnDemand (packaging/ondemand).
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import signal
import socket
import subprocess
import sys

from hpcgpu.host import log, private
from hpcgpu.host.relay import ssh_command

_CONFIG = "c.IdentityProvider.token = {token!r}\nc.ServerApp.port = {port}\nc.ServerApp.port_retries = 0\n"


def main(options: list[str]) -> int:
    """Run the server until it is shut down; return its exit code."""
    program = "lab" if importlib.util.find_spec("jupyterlab") else "server"
    if not importlib.util.find_spec("jupyter_server"):
        log.say(f"{sys.executable} has no Jupyter: pip install jupyterlab")
        return 2
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    folder = private.make_folder(private.user_folder("jupyter"))  # in the home, which the login node sees, too
    name = f"{os.environ.get('SLURM_JOB_ID') or os.environ.get('PBS_JOBID') or 'here'}-{os.getpid()}"
    config, address = folder / f"{name}.py", folder / name
    token = secrets.token_urlsafe(24)
    started: list[subprocess.Popen[bytes]] = []

    def forget() -> None:
        for path in (config, address):
            path.unlink(missing_ok=True)

    def end(*_: object) -> None:
        forget()  # before the server ends: a script has 2 s, and Jupyter may take longer
        if not started:
            sys.exit(128 + signal.SIGTERM)
        started[0].terminate()

    signal.signal(signal.SIGTERM, end)
    has_config = any(option.startswith("--config=") for option in options)
    try:
        if not has_config:
            private.write(config, _CONFIG.format(token=token, port=port))
            private.write(address, f"http://127.0.0.1:{port}/?token={token}\n")
            command = ssh_command(port, os.environ, host := socket.gethostname())
            way = f"from your machine: {command}; " if command else ""
            log.say(f"a Jupyter server on {host}; {way}its address: cat {address}")
        here = [] if has_config else ["--ip=127.0.0.1", f"--config={config}"]
        module = "jupyterlab" if program == "lab" else "jupyter_server"
        # -P: no module of Jupyter's is looked for in this folder, where people have a notebook.py of their own
        started.append(subprocess.Popen([sys.executable, "-P", "-m", module, "--no-browser", *here, *options]))
        return started[0].wait()
    finally:
        forget()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
