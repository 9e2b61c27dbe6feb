"""Workers of the command line beside a scheduler with another certificate."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import ranks
from comms import knock

from hpcgpu.deploy.network.tls import Certificate

# Nobody waits for it: what is tested is said at once, or the test never ends.
NEVER_S = 3600


def test_workers_of_the_command_line_hear_it_at_once(tmp_path: Path) -> None:
    theirs = Certificate.make()
    for name, text in (("cert", theirs.cert_pem), ("key", theirs.key_pem)):
        (tmp_path / name).write_text(text)
    words = ["--tls-ca-file", "cert", "--tls-cert", "cert", "--tls-key", "key", "--gpus", "sim:1"]

    async def join(address: str) -> tuple[int | None, str]:
        argv = ["-m", "hpcgpu.worker", address, *words, "--death-timeout", str(NEVER_S)]
        worker = await asyncio.create_subprocess_exec(
            sys.executable, *argv, cwd=tmp_path, env=ranks.environment(), stderr=asyncio.subprocess.PIPE
        )
        _, said = await worker.communicate()
        return worker.returncode, said.decode()

    code, said = knock(Certificate.make(), join)
    assert code == 1, said
    assert "the certificates do not belong together" in said
