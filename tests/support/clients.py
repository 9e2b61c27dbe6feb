"""A Python elsewhere, such as on a login node, that runs what a test sends."""

import contextlib
import json
import os
import select
import subprocess
import tempfile
import textwrap
from collections.abc import Sequence
from typing import Any

# Code comes in, what it returns goes out; what is printed goes to its standard error.
LOOP = """
import json, os, sys
answers, sys.stdout, scope = sys.stdout, sys.stderr, {"__name__": "__main__"}

def answer(**what):
    print(json.dumps(what, default=str), file=answers, flush=True)

answer(value=os.getpid())
for line in sys.stdin:
    code = json.loads(line)
    try:
        try:
            value = eval(compile(code, "<test>", "eval"), scope)
        except SyntaxError:
            value = exec(code, scope)
        answer(value=value)
    except BaseException as e:
        answer(error=f"{type(e).__name__}: {e}")
"""


class Client:
    """The Python that a command line starts, which ends with :data:`LOOP`."""

    def __init__(self, argv: Sequence[object], env: dict[str, str] | None = None) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - end() closes it
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._log, "text": True}
        self._process = subprocess.Popen(argv, **pipes, env=env)
        self.pid = int(self.answer())

    def __call__(self, code: str) -> Any:
        """Run code there; return its value, if it is an expression."""
        self.send(code)
        return self.answer()

    def send(self, code: str) -> None:
        """Have code run there, and do not wait."""
        with contextlib.suppress(BrokenPipeError):  # answer() tells why
            self._process.stdin.write(json.dumps(textwrap.dedent(code)) + "\n")
            self._process.stdin.flush()

    def answer(self, limit_s: float | None = None) -> Any:
        """Return the value of what was sent; fail if that raised an error. EOFError: it has ended."""
        if not select.select([self._process.stdout], [], [], limit_s)[0]:
            raise TimeoutError(f"no answer within {limit_s} s: {self.said}")
        line = self._process.stdout.readline()
        if not line:
            raise EOFError(f"the client has ended: {self.said}")
        answer = json.loads(line)
        assert "error" not in answer, f"{answer['error']}\n{self.said}"
        return answer["value"]

    @property
    def said(self) -> str:
        """What it has printed."""
        return os.pread(self._log.fileno(), 1 << 24, 0).decode(errors="replace")

    def end(self) -> None:
        """Have it end; its standard input is closed."""
        try:
            self._process.communicate(timeout=90)
        finally:
            self.kill()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()
        self._log.close()
