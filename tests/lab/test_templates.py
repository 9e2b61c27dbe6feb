"""The job templates on Slurm: sbatch takes each as it stands, and they run what they are for, all of them at once.

There is neither Apptainer nor pyxis in the lab. Programs of these names stand in for them: they refuse what the real
ones would not know, and run the command as it is.
"""

from lab import CHECKOUT, Lab
from paths import ROOT
from programs import COUNT_HOSTS
from waiting import scaled

TEMPLATES = sorted(path.name for path in (ROOT / "jobscripts").glob("slurm*.sbatch"))
SMALL = ("--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1", "--gpus-per-node=1")
APPTAINER = """#!/bin/bash
[ "$1 $2 $3" = "exec --nv my.sif" ] || { echo "apptainer: $*" >&2; exit 255; }
exec "${@:4}"
"""
# of NVIDIA/pyxis, README: the options that its plugin adds to srun
PYXIS = """#!/bin/bash
seen=
for word in "$@"; do
    shift
    case $word in
        --container-image=my.sqsh | --container-workdir=/* | --container-mounts=/*:/*,/*:/*) seen+=. ;;
        --container-*) echo "srun: unrecognized option '$word'" >&2; exit 1 ;;
        *) set -- "$@" "$word" ;;
    esac
done
[ "$seen" = ... ] || exit 1
exec /usr/bin/srun "$@"
"""


def test_sbatch_takes_them(slurm_lab: Lab) -> None:
    for name in TEMPLATES:
        argv = ["sbatch", "--test-only", f"{CHECKOUT}/jobscripts/{name}", "my_script.py"]
        done = slurm_lab.exec(slurm_lab.login, argv)
        assert done.returncode == 0, (name, done.stderr)
        assert "to start at" in done.stderr, name


def test_they_run(slurm_lab: Lab) -> None:
    """Each in a folder of its own; what a run says stands in the log of its job."""
    files = {"bin/apptainer": APPTAINER, "pyxis/srun": PYXIS, "runs.txt": "first 1\nsecond 2", "s.py": COUNT_HOSTS}
    for path, text in files.items():
        slurm_lab.write(f"templates/{path}", text)
    slurm_lab.exec(slurm_lab.login, ["sh", "-c", "chmod 755 templates/*/*; rm -f templates/*.out"], check=True)

    def submit(name: str, *words: str, options: tuple[str, ...] = SMALL, env: str = "", index: str = "") -> str:
        template = f"{CHECKOUT}/jobscripts/slurm{name}.sbatch"
        line = ["sbatch", "--parsable", f"--output=slurm{name}{index}.out", *options, template, *words]
        argv = ["sh", "-c", f'cd templates; {env} exec "$@"', "sh", *line]
        return slurm_lab.exec(slurm_lab.login, argv, check=True).stdout.strip()

    sim = ("--gpus", "sim:1", "--no-dashboard", "--death-timeout", f"{scaled(180):.0f}")  # 15 ranks start at once
    here = '"$PWD"'
    jobs = {
        "full": submit("-full", *sim, "s.py", "its", "arguments"),
        "apptainer": submit("-apptainer", *sim, "s.py", env=f"IMAGE=my.sif PATH={here}/bin:$PATH"),
        "pyxis": submit("-pyxis", *sim, "s.py", env=f"IMAGE=my.sqsh PATH={here}/pyxis:$PATH"),
        "sweep": submit("-sweep", *sim, f"{CHECKOUT}/examples/sweep.py", "--grid", "rate=0.1,0.01"),
        "array": submit("-array", "runs.txt", *sim, "s.py", options=("--array=1-3", *SMALL[1:]), index="-%a"),
    }
    array = jobs.pop("array")
    codes = {name: slurm_lab.wait_job(job)["ExitCode"] for name, job in jobs.items()}
    logs = {name: slurm_lab.read(f"templates/slurm-{name}.out") for name in jobs}
    assert codes == dict.fromkeys(logs, "0:0"), logs
    assert "HOSTS 2 WORKERS 2 ARGUMENTS its arguments" in logs["full"]
    assert all("HOSTS 2 WORKERS 2 ARGUMENTS" in logs[name] for name in ("apptainer", "pyxis")), logs
    assert "best of 2: rate=0.1, loss" in logs["sweep"]
    codes = {i: slurm_lab.wait_job(f"{array}_{i}")["ExitCode"] for i in (1, 2, 3)}
    runs = {i: slurm_lab.read(f"templates/slurm-array-{i}.out") for i in (1, 2, 3)}
    assert codes == {1: "0:0", 2: "0:0", 3: "2:0"}, runs
    assert "HOSTS 1 WORKERS 1 ARGUMENTS first 1" in runs[1]
    assert "HOSTS 1 WORKERS 1 ARGUMENTS second 2" in runs[2]
    assert runs[3] == "line 3 of runs.txt has no arguments for this run\n"
