"""Commands in a container, one after the other, without a ``docker exec`` for each of them."""

from __future__ import annotations

import json
import os
import pwd
import select
import subprocess
import sys
import tempfile
import time
from typing import Any


class Errands:
    """A container's end of it, as root."""

    def __init__(self, container: str, checkout: str) -> None:
        argv = ["docker", "exec", "-i", container, "/usr/bin/python3", "-I", f"{checkout}/tests/support/errands.py"]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT)

    def run(self, timeout: float, **errand: Any) -> dict[str, Any]:
        """Run a command and return its exit code and what it printed."""
        try:
            self._process.stdin.write(json.dumps(errand).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # why, is to be read
        line = self._read_line(timeout)
        try:
            return json.loads(line)
        except json.JSONDecodeError:
            raise EOFError(line) from None

    def _read_line(self, timeout: float) -> str:
        line = b""
        end = time.monotonic() + timeout
        while not line.endswith(b"\n"):
            if not select.select([self._process.stdout], [], [], max(0.0, end - time.monotonic()))[0]:
                raise TimeoutError(f"the container has not answered within {timeout} s")
            part = os.read(self._process.stdout.fileno(), 1 << 20)
            if not part:
                break
            line += part
        return line.decode()

    def close(self) -> None:
        """End it; what runs in the container reads the end of its input, and ends."""
        self._process.kill()
        self._process.communicate()


def run_here(argv: list[str], user: str, env: dict[str, str], stdin: str) -> dict[str, Any]:
    """Run a command as ``docker exec`` would: in a session of its own, until its first process has ended."""
    who = pwd.getpwnam(user)
    env = {**os.environ, "HOME": who.pw_dir, **env}
    place = who.pw_dir if who.pw_uid else "/"
    ids = {"user": who.pw_uid, "group": who.pw_gid, "extra_groups": os.getgrouplist(user, who.pw_gid)}
    # Files, not pipes: what a command leaves behind may hold its output open.
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        given.write(stdin.encode())
        given.seek(0)
        pipes = {"stdin": given, "stdout": out, "stderr": err}
        code = subprocess.call(argv, cwd=place, env=env, start_new_session=True, **ids, **pipes)
        out.seek(0)
        err.seek(0)
        code = code if code >= 0 else 128 - code  # as a shell, and docker, has it
        return {"code": code, "out": out.read().decode(errors="replace"), "err": err.read().decode(errors="replace")}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(run_here(**json.loads(line))), flush=True)
