"""All that wants a GPU, in one command of at most 9 minutes: ``make gpu``; without a package index ``scripts/gpu.sh``.

``scripts/gpu.sh [run]``
    Runs the parts one after the other, the most valuable first, or those of ``--only`` in their order: each file of
    tests marked ``gpu``, the measurements of ``benchmarks/gpu_first_hour.py``, the GPU rows of the benchmarks, the
    examples with ``--cupy`` or ``--gpu``. Each is a process of its own with a time limit; after one that fails the next
    one runs.
    When the time of all is up, the rest is not begun. Into ``--out`` (``$OUT``, else ``build/gpu``) go four files:
    ``gpu.md`` and ``gpu.json``, written anew after each part, ``gpu.log`` with all that the parts printed, and
    ``machine.txt``. Exit code 1: a part failed, or its time was up; 3: none failed, and something was not done for want
    of a GPU or a library, which the part's line names; 0: all was done.
``scripts/gpu.sh wheels [NAME ...]``
    Fetches what a machine without a package index lacks into ``.gpu-wheels``, of at most 64 MiB: hpcgpu's
    requirements but for NumPy, pytest, and what is named (RMM for CUDA 13). Carry the folder with the checkout: ``run``
    unpacks those of them that the other machine's Python has not got, or in a version that is too old, into
    ``.gpu-site``. CuPy and cuda.core must be there already, or be named, where they fit.

Imports the standard library alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import gpu_wheels

ROOT = Path(__file__).parents[1]
WHEELS, SITE, OUT = ROOT / ".gpu-wheels", ROOT / ".gpu-site", Path(os.environ.get("OUT") or ROOT / "build/gpu")
TOTAL_S = 525.0  # and then the last part is ended
KEPT_CHARACTERS = 8000
ASKING_S, ENDING_S = 30.0, 5.0
# What a library says of itself and of the GPUs; the last line that is printed is kept.
ASK: Mapping[str, str] = {
    "driver": "import pynvml as n; n.nvmlInit(); print(n.nvmlSystemGetDriverVersion())",
    "cupy": "import cupy; n = cupy.cuda.runtime.getDeviceCount(); cupy.zeros(1).get(); print(cupy.__version__, *("
    "cupy.cuda.runtime.getDeviceProperties(i)['name'].decode() for i in range(n)), sep=', ')",
    "cuda.core": "import cuda.core as c; c.Device(0).set_current(); print(c.__version__, c.Device(0).name, sep=', ')",
    "rmm": "import rmm; rmm.DeviceBuffer(size=1); print(rmm.__version__)",
    "cudf": "import cudf; cudf.Series([1]); print(cudf.__version__)",
    "torch": "import torch; print(torch.__version__, torch.cuda.get_device_name(0), sep=', ')",
    "numba": "from numba import cuda; import numba_cuda; cuda.device_array(1); print(numba_cuda.__version__)",
    **{
        name: f"import cupy, {also}, {name} as it; cupy.zeros(1).get(); print(it.__version__)"
        for name, also in {"xgboost": "dask", "cupy_xarray": "zarr", "cuml": "sklearn", "dask_cudf": "pandas"}.items()
    },
}
# What a figure may depend on; by the shell, since most of it is a program's or the kernel's.
MACHINE: Mapping[str, str] = {
    "limits of this process": "ulimit -a",
    "C library": "getconf GNU_LIBC_VERSION; uname -a; cat /etc/os-release",
    "cgroup": "cat /proc/self/cgroup; grep . /sys/fs/cgroup/{cpu,memory,pids,cpuset}.*",
    "memory": "head -30 /proc/meminfo; cat /sys/kernel/mm/transparent_hugepage/*; df -h /dev/shm /tmp .; numactl -H",
    "GPUs and their links": "nvidia-smi topo -m; nvidia-smi -q",  # compute mode, ECC and PCIe links are among it
    "processor": "lscpu",
    "packages": f"{sys.executable} -m pip list --disable-pip-version-check",
}
XID = "dmesg 2>/dev/null | grep -iE 'xid|nvrm'"
# -v: what has passed is told by one whose time was up, too
PYTEST = ("-m", "pytest", "-v", "-rs", "--timeout", "100", "-p", "no:cacheprovider", "-m", "gpu")
# The examples on libraries, and the library that each one's GPU form needs.
LIBRARIES = {
    "examples/libraries/xgboost_trees.py": "xgboost",
    "examples/libraries/xarray_zarr.py": "cupy_xarray",
    "examples/libraries/sklearn_joblib.py": "cuml",
    "examples/libraries/pandas_shuffle.py": "dask_cudf",
    "examples/libraries/torch_ddp.py": "torch",
}
# By what their answers are worth: wrong values and lost memory, what is new, speeds, then what is nice to know.
# A name alone is a measurement of benchmarks/gpu_first_hour.py.
BY_VALUE = (
    *("tests/gpu/spill/test_spill_gpu.py", "order", "memcheck", "tests/gpu/spill/test_libraries_gpu.py"),
    *(
        "tests/gpu/spill/test_cuda_api.py",
        "lost",
        "peers",
        "benchmarks/protocols.py",
        "beside",
        "benchmarks/main_job.py",
    ),
    *("lock", "stage", "mixed", "stall", "tests/gpu/deploy/test_rmm.py", "rescues", "errors", "full", "copies", "jax"),
    *("ucx", "small", "shared", "contexts", "lag", "pool", "starts", "waiting", "killed", "pinned", "torch"),
    *("benchmarks/spill.py", "examples/svd.py", "examples/schedulers.py", "examples/memory_types.py"),
    *LIBRARIES,
)


class Part(NamedTuple):
    """What is run, by the same Python, and the library without which there is no use in it."""

    name: str
    arguments: tuple[str, ...]
    limit_s: float
    needs: str = ""


# What is no file of tests and no measurement; its arguments and its limit, in seconds.
OTHERS = {
    "benchmarks/spill.py": (("benchmarks/spill.py", "--only", "loops", "--gpu-only", "--runs", "1"), 90),
    "benchmarks/protocols.py": (("benchmarks/protocols.py", "--cupy", "--runs", "1"), 75),
    "benchmarks/main_job.py": (("benchmarks/main_job.py", "--gpu-only", "--quick"), 75),
    "examples/svd.py": (("-m", "hpcgpu", "run", "examples/svd.py", "--cupy"), 40),
    "examples/schedulers.py": (("examples/schedulers.py", "--size", "8000000", "--cupy"), 45),
    "examples/memory_types.py": (("examples/memory_types.py", "--cupy"), 40),
    "memcheck": (("benchmarks/gpu_first_hour.py", "memcheck"), 60),
}
LONG_S = {"beside": 130.0, "ucx": 120.0}


def part(name: str) -> Part:
    """Return a part; each is a process, as a crash, or an error from which a context does not recover, ends one."""
    if name in OTHERS:
        arguments, limit_s = OTHERS[name]
        return Part(name, arguments, limit_s, "cupy")
    if name in LIBRARIES:
        return Part(name, ("-m", "hpcgpu", "run", name, "--gpu"), 40, LIBRARIES[name])
    if name.startswith("tests/"):
        return Part(name, (*PYTEST, name), 90)
    return Part(f"first hour: {name}", ("benchmarks/gpu_first_hour.py", name), LONG_S.get(name, 45))


def parts_by_value() -> tuple[Part, ...]:
    """Return all parts; files of tests that have no place in the order come last."""
    tests = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests/gpu").rglob("test_*.py"))
    return tuple(part(name) for name in (*BY_VALUE, *(name for name in tests if name not in BY_VALUE)))


PARTS = parts_by_value()


@dataclass
class Result:
    """What has become of a part. ``outcome``: done, failed, out of time, not done; ``why``: what a line can tell."""

    name: str
    command: str
    limit_s: float
    outcome: str = "not done"
    why: str = ""
    wall_s: float = 0.0
    exit_code: int | None = None
    tail: str = ""
    figures: list[dict[str, Any]] = field(default_factory=list)


class Ended(NamedTuple):
    """A program that has ended: its exit code, None when its time was up, and what it printed."""

    exit_code: int | None
    printed: str
    wall_s: float


def ended(argv: Sequence[str], limit_s: float, folder: Path, env: Mapping[str, str]) -> Ended:
    """Run a program with its children; all of them are ended when the time is up."""
    start = time.monotonic()
    path = folder / "printed"
    with path.open("wb") as file:  # not a pipe, which a child that outlives the program would keep open
        program = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=file, stderr=file, cwd=ROOT, env=env, start_new_session=True
        )
        code: int | None = None
        try:
            code = program.wait(max(limit_s, 0.1))
        except subprocess.TimeoutExpired:
            pass
        finally:
            end(program)
    printed = path.read_bytes().decode(errors="replace")
    path.unlink()
    with (folder / "gpu.log").open("a") as log:
        log.write(f"===== {' '.join(argv)}\n{printed}\n===== exit code {code}, {time.monotonic() - start:.1f} s\n\n")
    return Ended(code, printed, time.monotonic() - start)


def end(program: subprocess.Popen[bytes]) -> None:
    """End what is left of a program's session: by SIGTERM, so that clusters close, then by SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if program.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(program.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                program.wait(ENDING_S)
    with contextlib.suppress(ProcessLookupError):  # children of a program that has ended itself
        os.killpg(program.pid, signal.SIGKILL)


def last_line(text: str) -> str:
    """Return the last line in which anything stands."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "it printed nothing")


def asked(folder: Path, env: Mapping[str, str], deadline: float) -> dict[str, dict[str, str]]:
    """Return what each library is, or why it cannot be used; each in a process of its own, for one may crash."""
    answers = {}
    for name, source in ASK.items():
        limit_s = min(ASKING_S, deadline - time.monotonic())
        done = ended([sys.executable, "-c", source], limit_s, folder, env)
        if done.exit_code == 0:
            answers[name] = {"is": last_line(done.printed)}
        else:
            code = "its time was up" if done.exit_code is None else f"exit code {done.exit_code}"
            answers[name] = {
                "why_not": last_line(done.printed) if done.exit_code == 1 else f"{code}: {last_line(done.printed)}"
            }
    return answers


def run_part(
    part: Part, libraries: Mapping[str, Mapping[str, str]], out: Path, env: Mapping[str, str], left_s: float
) -> Result:
    """Run a part, unless what it needs is not there or the time of all is up."""
    result = Result(part.name, " ".join(("python", *part.arguments)), part.limit_s)
    if why := libraries.get(part.needs, {}).get("why_not"):
        result.why = f"{part.needs}: {why}"
        return result
    if left_s <= 0:
        result.outcome, result.why = "out of time", "the parts before it took all of it"
        return result
    report = out / "tests.xml"
    report.unlink(missing_ok=True)
    options = [f"--junitxml={report}"] if "pytest" in part.arguments else []
    done = ended([sys.executable, *part.arguments, *options], min(part.limit_s, left_s), out, env)
    result.exit_code, result.wall_s, result.tail = (
        done.exit_code,
        round(done.wall_s, 1),
        done.printed[-KEPT_CHARACTERS:],
    )
    result.figures = read_figures(done.printed)
    judge(result, read_tests(report.read_text()) if report.exists() else None)
    report.unlink(missing_ok=True)
    return result


def judge(result: Result, tests: Tests | None) -> None:
    """Say what has become of a part that has run."""
    missing = {figure.get("why", "no value") for figure in result.figures if figure["value"] is None}
    if result.exit_code is None:
        result.outcome, result.why = "out of time", f"after {result.wall_s:.0f} s: {last_line(result.tail)}"
    elif result.exit_code:
        result.outcome, result.why = "failed", f"exit code {result.exit_code}: {last_line(result.tail)}"
    elif (tests and not tests.passed) or (missing and all(f["value"] is None for f in result.figures)):
        result.outcome, result.why = "not done", "; ".join(sorted(missing))
    else:
        result.outcome, result.why = "done", "; ".join(sorted(missing)) or ("" if tests else last_line(result.tail))
    if result.figures and result.outcome == "done" and not missing:
        result.why = f"{len(result.figures)} figures"
    if tests:
        result.why = str(tests) if result.exit_code in (0, 1) else f"{result.why}; {tests}"


@dataclass(frozen=True)
class Tests:
    """What pytest says: how many passed, which failed, and why others were skipped."""

    passed: int
    failed: tuple[str, ...]
    skipped: Mapping[str, int]

    def __str__(self) -> str:
        words = [f"{self.passed} passed"]
        words += [f"{len(self.failed)} failed: {', '.join(self.failed)}"] if self.failed else []
        return "; ".join(words + [f"{n} skipped: {why}" for why, n in self.skipped.items()])


def read_tests(xml: str) -> Tests:
    """Read pytest's JUnit XML."""
    failed, skipped, passed = [], Counter[str](), 0
    for case in ElementTree.fromstring(xml).iter("testcase"):
        found = {child.tag: child for child in case}
        if "failure" in found or "error" in found:
            failed.append(case.get("name", ""))
        elif "skipped" in found:
            skipped[found["skipped"].get("message", "")] += 1
        else:
            passed += 1
    return Tests(passed, tuple(failed), skipped)


def read_figures(text: str) -> list[dict[str, Any]]:
    """Return the figures among the lines of a benchmark; examples print other lines."""
    figures = []
    for line in text.splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            found = json.loads(line)
            if isinstance(found, dict) and {"bench", "value"} <= found.keys():
                figures.append(found)
    return figures


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Render a Markdown table."""
    cells = (tuple(str(cell).replace("|", "\\|").replace("\n", " ") for cell in row) for row in rows)
    return "\n".join(f"| {' | '.join(row)} |" for row in (columns, ("---",) * len(columns), *cells))


def page(report: Mapping[str, Any]) -> str:
    """Render the report as Markdown: the machine, a row for each part, the figures, and the end of what went wrong."""
    libraries = [(n, a.get("is", ""), a.get("why_not", "")) for n, a in report["libraries"].items()]
    parts = [(p["name"], p["outcome"], p["wall_s"], p["why"]) for p in report["parts"]]
    figures = [
        tuple(f.get(c, "") for c in ("bench", "case", "measure", "who", "value", "unit", "runs"))
        for p in report["parts"]
        for f in p["figures"]
    ]
    out = [
        "# On a GPU",
        f"{report['date']}. {report['machine']}; {report['wall_s']:.0f} s in all. `scripts/gpu.sh`",
        table(("part", "outcome", "s", "what"), parts),
        table(("library", "is", "cannot be used"), libraries),
    ]
    if figures:
        out.append(table(("bench", "case", "measure", "who", "value", "unit", "runs"), figures))
    out += [f"## Errors that the driver has told the kernel\n\n    {report['xid']}"] * bool(report["xid"])
    for part in report["parts"]:
        if part["outcome"] in ("failed", "out of time") and part["tail"]:
            fence = "`" * 4
            out.append(f"## {part['name']}\n\n`{part['command']}`\n\n{fence}\n{part['tail'].strip()}\n{fence}")
    return "\n\n".join(out) + "\n"


def shell(command: str) -> str:
    """Return what a command of the shell prints, on stderr too; nothing may keep the parts waiting."""
    try:
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=20, errors="replace")
    except (OSError, subprocess.TimeoutExpired) as e:
        return f"{e}\n"
    return done.stdout + done.stderr


def write_machine(path: Path) -> None:
    """Write what is known of the machine."""
    path.write_text("\n".join(f"===== {what}: {command}\n{shell(command)}" for what, command in MACHINE.items()))


def run(out: Path, parts: Sequence[Part], env: Mapping[str, str], start: float) -> int:
    """Run the parts, write the report after each, and return the exit code."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "gpu.log").unlink(missing_ok=True)
    write_machine(out / "machine.txt")
    report: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "machine": f"{len(os.sched_getaffinity(0))} cores, {platform.system()} {platform.release()}, "
        f"Python {platform.python_version()}",
        "libraries": asked(out, env, start + TOTAL_S),
        "parts": [],
    }
    for name, answer in report["libraries"].items():
        print(f"{name:<26} {answer.get('is') or 'cannot be used: ' + answer['why_not']}", flush=True)
    for part in parts:
        left_s = TOTAL_S - (time.monotonic() - start)
        result = run_part(part, report["libraries"], out, env, left_s)
        report["parts"].append(asdict(result))
        report["wall_s"] = round(time.monotonic() - start, 1)
        report["xid"] = shell(XID)
        (out / "gpu.json").write_text(json.dumps(report, indent=1) + "\n")
        (out / "gpu.md").write_text(page(report))
        print(f"{part.name:<34} {result.outcome:<11} {result.wall_s:5.1f} s  {result.why}", flush=True)
    print(f"the report: {out / 'gpu.md'}; gpu.json, gpu.log and machine.txt are beside it")
    outcomes = {part["outcome"] for part in report["parts"]}
    return 1 if outcomes & {"failed", "out of time"} else 3 if "not done" in outcomes else 0


def environment(folder: Path, site: Path) -> dict[str, str]:
    """Return the variables of the parts; wheels that were carried are unpacked first."""
    if folder.exists():
        gpu_wheels.unpack(folder, site)
    paths = [str(site)] * folder.exists() + [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    # children that start other Pythons must find the same
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}


def main(argv: Sequence[str]) -> int:
    """Run or fetch, as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="run all parts")
    running.add_argument("--out", type=Path, default=OUT, help="where the report goes (%(default)s)")
    running.add_argument(
        "--only", nargs="+", metavar="PART", choices=[p.name for p in PARTS], help="these parts, in this order"
    )
    fetching = commands.add_parser("wheels", help="fetch what a machine without an index lacks")
    fetching.add_argument("--python", default="3.12", help="the version of the other machine's Python (%(default)s)")
    beside = {"default": gpu_wheels.CARRIED, "help": "packages beside hpcgpu's own requirements (%(default)s)"}
    fetching.add_argument("names", nargs="*", metavar="NAME", **beside)
    options = parser.parse_args(argv or ["run"])
    if options.command == "wheels":
        return gpu_wheels.fetch(WHEELS, options.python, options.names)
    start = time.monotonic()
    named = {part.name: part for part in PARTS}
    parts = [named[name] for name in options.only or named]
    return run(options.out.resolve(), parts, environment(WHEELS, SITE), start)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
