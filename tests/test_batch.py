"""The contract of every batch system: scripts as golden files, readers on every output ever recorded."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from recordings import Record, records

from hpcgpu import batch
from hpcgpu.batch import BatchSystem, Local, Pbs, Slurm
from hpcgpu.errors import ConfigError, SubmitError
from hpcgpu.model import JobSpec, JobState, Result

DATA = Path(__file__).parent / "data" / "batch"
SYSTEMS = sorted(batch.SYSTEMS)
FILES = [(name, path) for name in ("slurm", "pbs") for path in sorted((DATA / name).glob("*/*.txt"))]
SPEC = JobSpec(
    name="svd",
    argv=("/opt/env/bin/hpcgpu", "launch", "--document", '{"shape": "gang", "what": "it\'s $HOME"}'),
    walltime_s=7200,
    nodes=2,
    tasks_per_node=4,
    cpus_per_task=8,
    gpus_per_node=4,
    memory_per_node_bytes=200 << 30,
    queue="gpu",
    account="proj",
    prologue=("module load cuda",),
    env=(("UCX_LOG_LEVEL", "warn"),),
    log_directory="/scratch/user1/logs",
    exit_file="/scratch/user1/logs/exit",
)
DIALECTS: dict[str, BatchSystem] = {
    "slurm": Slurm(),
    "slurm-gres": Slurm(gpus="gres", gpu_type="a100", cpus=False),
    "slurm-whole-nodes": Slurm(gpus="none", memory=False),
    "pbs": Pbs(),
    "pbs-whole-nodes": Pbs(gpus="none", mpiprocs=False, resources="system=polaris", launcher=("mpiexec",)),
    "local": Local(),
}


def golden(path: Path, text: str) -> None:
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert text == path.read_text(), f"{path.name} differs; if it should, UPDATE_GOLDEN=1 and read the diff"


def options(script: str) -> list[str]:
    return [line.split(" ", 1)[1] for line in script.splitlines() if line.startswith(("#SBATCH ", "#PBS "))]


@pytest.mark.parametrize("name", DIALECTS)
def test_script(name: str) -> None:
    golden(DATA / "golden" / "scripts" / f"{name}.sh", DIALECTS[name].script(SPEC))


def said(system: BatchSystem, record: Record) -> list[str]:
    """What the readers make of one record, as lines for a golden file."""
    result = Result(tuple(record.command.split()), record.returncode, record.stdout, record.stderr)
    lines = [f"$ {record.command.splitlines()[0][:100]}"]
    if re.search("qsub|sbatch", record.command) and not re.match(r"[A-Z]=\$\(|cd ", record.command):
        try:
            lines.append(f"  submitted: {system.read_submit(result)}")
        except SubmitError as error:
            lines.append(f"  {'passes' if error.transient else 'refused'}: {error}")
    try:
        for job_id, s in system.read_status(result).items():
            lines.append(f"  {job_id}: {s.state.name} ({s.native}) exit {s.exit_code} {s.reason}".rstrip())
    except SubmitError as error:
        if re.search("squeue|sacct|qstat", record.command):
            lines.append(f"  {'no answer' if error.transient else 'refused'}: {error}")
    if re.match(r"(SLURM_CONF=\S+ )?(scancel|qdel)", record.command):
        try:
            lines.append("  cancelled" if system.read_cancel(result) else "  gone already")
        except SubmitError as error:
            lines.append(f"  not cancelled: {error}")
    return lines


@pytest.mark.parametrize(("name", "path"), FILES, ids=[f"{n}-{p.parent.name}-{p.stem}" for n, p in FILES])
def test_every_recorded_output_is_read(name: str, path: Path) -> None:
    lines = [line for record in records(path) for line in said(batch.get(name), record)]
    golden(DATA / "golden" / name / path.parent.name / path.name, "\n".join(lines) + "\n")


@pytest.mark.parametrize("name", SYSTEMS)
@pytest.mark.parametrize("text", ["", "garbage", "\x00\ufffd", "|||", "{", '"1.x": {', "Job id\n---\n", "1|X|y|z|\n"])
def test_whatever_is_said_is_read(name: str, text: str) -> None:
    system = batch.get(name)
    assert all(isinstance(s.state, JobState) for s in system.read_status(Result((), 0, text, text)).values())
    for returncode in (0, 1, 124, 127, 255):
        with pytest.raises(SubmitError):
            system.read_submit(Result((), returncode, text, text))


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_program_that_failed_is_said_in_its_words(name: str) -> None:
    system = batch.get(name)
    for read in (system.read_submit, system.read_status, system.read_cancel):
        late = Result(("x",), 124, "", "x: no answer in 60 s; it was killed")
        with pytest.raises(SubmitError, match="no answer in 60 s") as caught:
            read(late)
        assert caught.value.transient
        with pytest.raises(SubmitError, match="no such program") as caught:
            read(Result(("x",), 127, "", "x: there is no such program on this machine"))
        assert not caught.value.transient


@pytest.mark.parametrize("name", SYSTEMS)
def test_one_command_asks_for_all_jobs(name: str) -> None:
    system = batch.get(name)
    for command in (system.status(["1.a", "2.b"]), system.history(["1.a", "2.b"])):
        assert command.timeout_s > 0
        assert "1.a" in " ".join(command.argv)
        assert "2.b" in " ".join(command.argv)


def test_an_unknown_state_is_a_value() -> None:
    assert Slurm().read_status(Result((), 0, "7|DREAMING|0|None|\n"))["7"].state is JobState.UNKNOWN
    status = Pbs().read_status(Result((), 0, '"7.a":{\n "job_state":"%",\n "comment":"a \\"b\\"",\n'))["7.a"]
    assert (status.state, status.native, status.reason) == (JobState.UNKNOWN, "%", 'a "b"')


def test_a_variable_of_a_job_is_no_fact_of_it() -> None:
    text = '"7.a":{\n    "job_state":"F",\n    "Env":{\n        "comment":"no",\n        "Exit_status":1\n    }\n}'
    status = Pbs().read_status(Result((), 0, text))["7.a"]
    assert (status.reason, status.exit_code) == ("", None)


@pytest.mark.parametrize(("code", "exit_code"), [("768", 3), ("9", 137), ("0:15", 143), ("2:0", 2), ("", None)])
def test_slurm_exit_codes(code: str, exit_code: int | None) -> None:
    assert Slurm().read_status(Result((), 0, f"7|FAILED|{code}|None|"))["7"].exit_code == exit_code


def test_sites_that_print_before_the_id() -> None:
    assert Slurm().read_submit(Result((), 0, "--> Verifying 1 node...OK\n\n123;cluster\n")) == "123"
    assert Pbs().read_submit(Result((), 0, "Welcome 12\n123.pbs-01.site.edu\n")) == "123.pbs-01.site.edu"


@pytest.mark.parametrize(
    ("system", "extra", "skip", "there", "gone"),
    [
        (Slurm(), ("--constraint=a100", "-C x"), (), ["--constraint=a100", "--constraint=x"], []),
        (Slurm(), ("-A other",), (), ["--account=other"], ["--account=proj"]),
        (Slurm(), ("--exclusive", "-q debug -N 3"), (), ["--exclusive", "--qos=debug", "--nodes=3"], ["--nodes=2"]),
        (Slurm(), ('--comment="two words"',), (), ['--comment="two words"'], []),
        (Slurm(), (), ("-N", "--mem"), ["--ntasks-per-node=4", "--job-name=big-N-mem"], ["--nodes=2", "--mem=204800M"]),
        (Slurm(), (), ("--mem=4G",), [], ["--mem=204800M"]),
        (Pbs(), ("-l filesystems=home:eagle",), (), ["-l filesystems=home:eagle", "-l place=scatter"], []),
        (Pbs(), ("-l place=free",), (), ["-l place=free"], ["-l place=scatter"]),
        (Pbs(), ("-l walltime=1:00,place=free",), (), ["-l walltime=1:00", "-l place=free"], ["-l place=scatter"]),
        (Pbs(), (), ("-l walltime",), ["-l place=scatter"], ["-l walltime=02:00:00"]),
        (Pbs(), (), ("-l",), ["-N big-N-mem"], ["-l walltime=02:00:00", "-l place=scatter"]),
    ],
)
def test_options_are_compared_as_options(
    system: BatchSystem, extra: tuple[str, ...], skip: tuple[str, ...], there: list[str], gone: list[str]
) -> None:
    spec = replace(SPEC, name="big-N-mem", extra_directives=extra, skipped_directives=skip)
    found = options(system.script(spec))
    assert [o for o in there if o not in found] == []
    assert [o for o in gone if o in found] == []


@pytest.mark.parametrize("text", ["", "constraint=a100", "--comment=two words", "--a\n#SBATCH --b", '--a="b', "- x"])
def test_what_is_no_option_is_refused(text: str) -> None:
    for system in (Slurm(), Pbs()):
        for field in ("extra_directives", "skipped_directives"):
            with pytest.raises(ConfigError):
                system.script(replace(SPEC, **{field: (text,)}))


def test_names_that_an_option_cannot_carry_are_refused() -> None:
    for system in (Slurm(), Pbs()):
        for field in ("name", "queue", "account", "log_directory"):
            with pytest.raises(ConfigError, match=re.escape(repr("a\n#PBS")[1:-1])):
                system.script(replace(SPEC, **{field: "a\n#PBS"}))
    with pytest.raises(ConfigError, match="cannot carry 'two words'"):
        Pbs().script(replace(SPEC, account="two words"))
    with pytest.raises(ConfigError, match="for a host"):
        Pbs().script(replace(SPEC, log_directory="/a:b"))
    with pytest.raises(ConfigError, match="no backslash"):
        Slurm().script(replace(SPEC, log_directory="/a\\b"))


def test_names_come_through_sbatch_unharmed() -> None:
    """What a real sbatch made of the line that our script still has."""
    recorded = json.loads((DATA / "slurm" / "22.05.8" / "names.json").read_text())
    assert len(recorded) > 100
    for line, name in recorded.items():
        assert line in Slurm().script(replace(SPEC, name=name)).splitlines()


@pytest.mark.parametrize(
    "change",
    [{"nodes": 0}, {"name": ""}, {"argv": ()}, {"argv": ("a\0",)}, {"env": (("A B", ""),)}, {"gpus_per_node": -1}],
)
def test_a_job_that_cannot_be_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        replace(SPEC, **change)


def test_logs_stand_where_the_script_says() -> None:
    assert Slurm().log(SPEC, "7") == "/scratch/user1/logs/slurm-7.out"
    assert Pbs().log(SPEC, "7.a") == "/scratch/user1/logs/7.a.OU"
    assert Local().log(SPEC, "7.1") == "/scratch/user1/logs/svd.out"


def test_systems_by_name() -> None:
    assert batch.get("slurm", gpus="none") == Slurm(gpus="none")
    with pytest.raises(ConfigError, match="'slrum'; allowed: slurm, pbs, local"):
        batch.get("slrum")
    with pytest.raises(ConfigError, match="'gpu' says nothing about slurm; allowed: gpus, gpu_type, memory, cpus"):
        batch.get("slurm", gpu="x")
    for name in ("slurm", "pbs"):
        with pytest.raises(ConfigError, match="gpus='many'"):
            batch.get(name, gpus="many")
