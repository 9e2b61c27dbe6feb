"""The exit code is the script's, whatever has become of its output."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import ranks
import streams
from waiting import scaled

SCRIPT = """
with Client() as c:
    assert c.submit(sum, [1, 2]).result() == 3
end = int(sys.argv[1])
os.kill(os.getpid(), -end) if end < 0 else sys.exit(end)
"""


@pytest.mark.parametrize(
    ("words", "output", "end", "code"),
    [
        ("run", "closed", 0, 0),
        ("run", "full", 3, 3),
        ("run", "gone", -signal.SIGKILL, 128 + signal.SIGKILL),
        ("launch --launcher mpirun", "closed", -signal.SIGKILL, 128 + signal.SIGKILL),
        ("launch --launcher mpirun", "full", 0, 0),
        ("launch --launcher mpirun", "gone", 3, 3),
    ],
)
def test_the_exit_code_is_the_scripts(tmp_path: Path, words: str, output: str, end: int, code: int) -> None:
    argv = [str(ranks.BIN / "hpcgpu"), *words.split(), "--gpus", "sim:1", str(ranks.script(tmp_path, SCRIPT)), str(end)]
    assert streams.run(argv, output, ranks.environment(HOME=str(tmp_path)), timeout=scaled(120)) == code
