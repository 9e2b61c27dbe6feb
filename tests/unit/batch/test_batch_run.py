"""Scripts and commands of the batch systems as they run: real bash, real processes, and programs that replay."""

from __future__ import annotations

import os
import select
import shlex
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from paths import BATCH
from recordings import records
from waiting import scaled

from hpcgpu import batch
from hpcgpu.errors import SubmitError
from hpcgpu.host.run import run_sync
from hpcgpu.model import JobSpec

SYSTEMS = sorted(batch.SYSTEMS)
TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=12)
NASTY = [
    "$(id)",
    "`id`",
    "it's",
    'say "hi"',
    "a\\b\\",
    "two  words",
    "$HOME",
    "!!",
    "é日本",
    "-n",
    "a\nb",
    "*",
    "~",
    "#x",
    "",
]


def bash(script: str, cwd: Path | None = None) -> subprocess.CompletedProcess[bytes]:
    assert subprocess.run(["bash", "-n"], input=script.encode(), timeout=scaled(20)).returncode == 0
    return subprocess.run(["bash", "-s"], input=script.encode(), capture_output=True, cwd=cwd, timeout=scaled(20))


@settings(deadline=None, max_examples=25)
@given(st.lists(TEXT, max_size=4), TEXT)
@example(NASTY, "it's $(id)\n`x` \\")
def test_values_come_through_bash_unharmed(values: list[str], variable: str) -> None:
    shown = ("bash", "-c", 'printf "%s\\0" "$V" "$@"', "x", *values)
    spec = JobSpec(name="x", argv=shown, env=(("V", variable),), warn_s=60)
    done = [bash(batch.get(name).script(spec)) for name in SYSTEMS]
    expected = "".join(f"{value}\0" for value in (variable, *values)).encode()
    assert [(d.stdout, d.stderr, d.returncode) for d in done] == [(expected, b"", 0)] * len(SYSTEMS)


def test_a_template_hands_its_arguments_on(tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    for name in SYSTEMS:
        script.write_text(batch.get(name).script(JobSpec(name="x", argv=("printf", "<%s>"), arguments='"$@"')))
        done = subprocess.run(["bash", script, "a b", "$(id)", ""], capture_output=True, text=True, timeout=scaled(20))
        assert done.stdout == "<a b><$(id)><>"


@pytest.mark.parametrize("name", SYSTEMS)
@pytest.mark.parametrize(
    ("prologue", "argv", "exit_code"),
    [
        ((), ("true",), 0),
        ((), ("bash", "-c", "exit 7"), 7),
        (("false", "no-such-module-command"), ("true",), 0),
        (("exit 3",), ("true",), 3),
        ((), ("no-such-program",), 127),
        ((), ("bash", "-c", "kill -9 $$"), 137),
    ],
)
def test_the_exit_code_is_the_commands_and_is_left_in_its_file(
    name: str, prologue: tuple[str, ...], argv: tuple[str, ...], exit_code: int, tmp_path: Path
) -> None:
    file = tmp_path / "it's a $(file)"
    spec = JobSpec(name="x", argv=argv, prologue=prologue, exit_file=str(file))
    assert bash(batch.get(name).script(spec)).returncode == exit_code
    assert file.read_text() == f"{exit_code}\n"
    assert bash(batch.get(name).script(replace(spec, exit_file=""))).returncode == exit_code


def test_an_exit_code_that_comes_as_a_wait_for_it_ends_is_kept(tmp_path: Path) -> None:
    """The wait took the code and left the line's end, which was then taken for no code: in a quarter of such ends."""
    spec = JobSpec(name="x", argv=("sh", "-c", 'sleep "$1"; exit 23', "x"), arguments='"$@"', warn_s=60)
    seldom, often = "read -r -t 5 ", "read -r -t 0.001 "
    script = tmp_path / "job.sh"
    script.write_text(batch.get("slurm").script(spec).replace(seldom, often))
    assert often in script.read_text()
    codes = [subprocess.run(["bash", script, f"0.0{i:03}"], timeout=scaled(20)).returncode for i in range(100, 400, 7)]
    assert codes == [23] * len(codes)


@pytest.mark.parametrize(
    ("prologue", "handler", "exit_code"),
    [(True, "exit 9", 143), (False, "echo late >&2; exit 9", 9), (False, "-", 143)],
    ids=["in-the-prologue", "command-that-drains", "command-that-dies"],
)
def test_a_job_that_is_cancelled_leaves_its_exit_code(
    prologue: bool, handler: str, exit_code: int, tmp_path: Path
) -> None:
    """As batch systems do, every process of the job gets the signal."""
    fifo, file = tmp_path / "fifo", tmp_path / "exit"
    os.mkfifo(fifo)
    waits = ("bash", "-c", 'trap "$2" TERM; sleep 60 & echo > "$1"; wait; exit 0', "x", str(fifo), handler)
    spec = JobSpec(name="x", argv=("true",) if prologue else waits, exit_file=str(file))
    spec = replace(spec, prologue=(shlex.join(waits),) if prologue else ())
    script = batch.get("slurm").script(spec)
    job = subprocess.Popen(["bash", "-c", script], start_new_session=True, stderr=subprocess.PIPE)
    fifo.read_text()
    os.killpg(job.pid, 15)
    job.communicate(timeout=scaled(20))
    assert file.read_text() == f"{exit_code}\n"
    assert job.returncode == exit_code


# A rank: it says that it listens, says each signal, and ends with the code of its last argument when told so.
RANK = """
import os, signal, sys
signals = {signal.SIGUSR1, signal.SIGTERM}
signal.pthread_sigmask(signal.SIG_BLOCK, signals)
with open(sys.argv[1], "w") as out:
    print("listens", file=out, flush=True)
    for _ in range(int(sys.argv[2])):
        print(signal.Signals(signal.sigwait(signals)).name, file=out, flush=True)
sys.exit(int(sys.argv[3]))
"""


@pytest.mark.parametrize("name", SYSTEMS)
@pytest.mark.parametrize(("exit_code", "warnings"), [(0, 1), (3, 3)])
def test_a_warning_reaches_the_command_whose_exit_code_is_kept(
    name: str, exit_code: int, warnings: int, tmp_path: Path
) -> None:
    """Slurm sends it to the script alone."""
    fifo, file = tmp_path / "fifo", tmp_path / "exit"
    os.mkfifo(fifo)
    argv = (sys.executable, "-S", "-c", RANK, str(fifo), str(warnings), str(exit_code))
    spec = JobSpec(name="x", argv=argv, exit_file=str(file), warn_s=60)
    job = subprocess.Popen(["bash", "-c", batch.get(name).script(spec)], stderr=subprocess.PIPE)
    with fifo.open() as said:
        assert said.readline() == "listens\n"
        for _ in range(warnings):
            job.send_signal(signal.SIGUSR1)
            # One that comes while bash is not done with the one before is lost (bash 5.2.15).
            while not select.select([said], [], [], 1)[0]:
                job.send_signal(signal.SIGUSR1)
            assert said.readline() == "SIGUSR1\n"
    _, wrong = job.communicate(timeout=scaled(20))
    assert (job.returncode, file.read_text(), wrong) == (exit_code, f"{exit_code}\n", b"")


def test_warning_signal_ends_no_prologue_and_no_command(tmp_path: Path) -> None:
    fifo, more = tmp_path / "fifo", tmp_path / "more"
    os.mkfifo(fifo)
    os.mkfifo(more)
    waits = shlex.join(("bash", "-c", 'echo > "$1"; read line < "$2"', "x", str(fifo), str(more)))
    spec = JobSpec(name="x", argv=tuple(shlex.split(waits)), prologue=(waits,), warn_s=60)
    job = subprocess.Popen(["bash", "-c", batch.get("slurm").script(spec)], stderr=subprocess.PIPE)
    for _ in ("prologue", "command"):
        fifo.read_text()
        job.send_signal(signal.SIGUSR1)
        more.write_text("go on\n")
    _, wrong = job.communicate(timeout=scaled(20))
    assert (job.returncode, wrong) == (0, b"")


@pytest.mark.parametrize("prologue", [(), ("set -euo pipefail",)], ids=["", "set -e"])
def test_command_that_ends_at_the_warning_keeps_its_exit_code(prologue: tuple[str, ...], tmp_path: Path) -> None:
    """Of a bash that waits itself, one in nine loses it."""
    fifo, more = tmp_path / "fifo", tmp_path / "more"
    os.mkfifo(fifo)
    os.mkfifo(more)
    argv = ("bash", "-c", 'echo > "$1"; read line < "$2"; exit 3', "x", str(fifo), str(more))
    script = batch.get("slurm").script(JobSpec(name="x", argv=argv, prologue=prologue, warn_s=60))
    for _ in range(40):
        job = subprocess.Popen(["bash", "-c", script], stderr=subprocess.PIPE)
        fifo.read_text()
        job.send_signal(signal.SIGUSR1)
        more.write_text("go on\n")
        _, wrong = job.communicate(timeout=scaled(20))
        assert (job.returncode, wrong) == (3, b"")


@pytest.mark.parametrize(("name", "variable"), [("slurm", "SLURM_ARRAY_TASK_ID"), ("pbs", "PBS_ARRAY_INDEX")])
def test_each_element_leaves_an_exit_code_of_its_own(name: str, variable: str, tmp_path: Path) -> None:
    file = tmp_path / "it's a $(file)"
    argv = ("bash", "-c", f'exit "${variable}"')
    script = batch.get(name).script(JobSpec(name="x", argv=argv, exit_file=str(file), count=12))
    for index in (0, 11):
        assert bash(f"export {variable}={index}\n{script}").returncode == index
        assert Path(f"{file}.{index}").read_text() == f"{index}\n"
    assert not file.exists()


def test_command_reads_stdin_and_not_the_script(tmp_path: Path) -> None:
    spec = JobSpec(name="x", argv=("bash", "-c", "cat > /dev/null; exit 3"), exit_file=str(tmp_path / "exit"))
    assert bash(batch.get("slurm").script(spec)).returncode == 3
    script = batch.get("slurm").script(JobSpec(name="x", argv=("cat",), exit_file=str(tmp_path / "exit")))
    done = subprocess.run(["bash", "-c", script], input=b"given", capture_output=True, timeout=scaled(20))
    assert done.stdout == b"given"


def test_options_end_before_commands_and_pbs_changes_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "a b"
    folder.mkdir()
    script = f"export PBS_O_WORKDIR='{folder}'\n{batch.get('pbs').script(JobSpec(name='x', argv=('pwd',)))}"
    assert bash(script, cwd=tmp_path).stdout.decode() == f"{folder}\n"
    spec = JobSpec(name="x", argv=("echo", "a\n#SBATCH --nodes=9\n#PBS -l select=9"), prologue=("true\n#PBS -q evil",))
    for name in ("slurm", "pbs"):
        lines = batch.get(name).script(spec).splitlines()
        assert all(line.startswith("#") for line in lines[: lines.index("")])
        assert "#PBS -q evil" in lines[lines.index("") :]


REPLAYED = [
    ("slurm", "22.05.8/02-sbatch-refused.txt", "nosuch", "Invalid partition name specified"),
    ("slurm", "22.05.8/12-controller-hangs.txt", "sbatch", "Socket timed out"),
    ("pbs", "head/02-qsub-bad-queue.txt", "nosuch", "Unknown queue"),
    ("pbs", "release/02-qsub-bad-queue.txt", "closed", "Queue is not enabled"),
    ("pbs", "release/03-qsub-bad-resource.txt", "has space", "illegal -N value"),
]


@pytest.mark.parametrize(("name", "path", "word", "said"), REPLAYED, ids=[f"{n}-{p}" for n, p, *_ in REPLAYED])
def test_a_refusal_reaches_the_caller(
    name: str, path: str, word: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program of the batch system's name prints what was recorded; the script reaches its standard input."""
    record = next(r for r in records(BATCH / name / path) if word in r.command and r.returncode)
    system = batch.get(name)
    spec = JobSpec(name="x", argv=("true",))
    command = system.submit(system.script(spec), spec)
    program = tmp_path / command.argv[0]
    (tmp_path / "said").write_text(record.stderr)
    program.write_text(f'#!/bin/sh\ncat > "$0.script"\ncat "${{0%/*}}/said" >&2\nexit {record.returncode}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(SubmitError, match=said) as caught:
        system.read_submit(run_sync(command))
    assert record.stderr.partition("\nusage:")[0].strip() in str(caught.value)
    assert (tmp_path / f"{program.name}.script").read_text() == command.stdin
