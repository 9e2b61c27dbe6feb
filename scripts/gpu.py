"""All that wants a GPU, in one command of at most 8 minutes: ``make gpu``; without a package index ``scripts/gpu.sh``.

``scripts/gpu.sh [run]``
    Runs the parts one after the other: the tests marked ``gpu``, the GPU rows of the benchmarks, the examples with
    ``--cupy``. Each has a time limit of its own; after one that fails the next one runs. ``gpu.json`` and ``gpu.md``
    are written anew after each part, into ``--out``. Exit code 1: a part failed, or its time was up; 3: none failed,
    and something was not done for want of a GPU or a library; 0: all was done.
``scripts/gpu.sh wheels [NAME ...]``
    Fetches what a machine without a package index lacks into ``.gpu-wheels``, of at most 64 MiB: hpcgpu's
    requirements, pytest, and what is named. Carry the folder with the checkout: ``run`` unpacks those of them that the
    other machine's Python has not got, or in a version that is too old, into ``.gpu-site``. CuPy and cuda.core must be
    there already, or be named, where they fit.

Imports the standard library alone; where there are wheels also ``packaging``, if need be out of its wheel.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import zipfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from email.parser import HeaderParser
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
WHEELS, SITE, OUT = ROOT / ".gpu-wheels", ROOT / ".gpu-site", ROOT / "build/gpu"
MOST_WHEEL_BYTES = 64 * 2**20
TOTAL_S = 465.0  # and then the last part is ended
KEPT_CHARACTERS = 8000
ASKING_S, ENDING_S = 30.0, 5.0
# pip matches a platform's glibc exactly: the usual ones of wheels, newest first
GLIBCS = (*(f"2_{n}" for n in (35, 34, 31, 28, 27, 24, 17, 12, 5)), "2014", "2010", "1")
# What a library says of itself and of the GPUs; the last line that is printed is kept.
ASK: Mapping[str, str] = {
    "driver": "import pynvml as n; n.nvmlInit(); print(n.nvmlSystemGetDriverVersion())",
    "cupy": "import cupy; n = cupy.cuda.runtime.getDeviceCount(); cupy.zeros(1).get(); print(cupy.__version__, *("
    "cupy.cuda.runtime.getDeviceProperties(i)['name'].decode() for i in range(n)), sep=', ')",
    "cuda.core": "import cuda.core as c; c.Device(0).set_current(); print(c.__version__, c.Device(0).name, sep=', ')",
    "rmm": "import rmm; rmm.DeviceBuffer(size=1); print(rmm.__version__)",
    "cudf": "import cudf; cudf.Series([1]); print(cudf.__version__)",
}


class Part(NamedTuple):
    """What is run, by the same Python, and the library without which there is no use in it."""

    name: str
    arguments: tuple[str, ...]
    limit_s: float
    needs: str = ""


# -v: what has passed is told by one whose time was up, too
TESTS = ("-m", "pytest", "-v", "-rs", "--timeout", "100", "-p", "no:cacheprovider", "-m", "gpu", "tests/gpu")
PARTS = (
    Part("tests/gpu", TESTS, 180),
    Part("benchmarks/spill.py", ("benchmarks/spill.py", "--only", "loops", "--gpu-only", "--runs", "3"), 90, "cupy"),
    Part("examples/svd.py", ("-m", "hpcgpu", "run", "examples/svd.py", "--cupy"), 40, "cupy"),
    Part("examples/schedulers.py", ("examples/schedulers.py", "--size", "8000000", "--cupy"), 45, "cupy"),
    Part("examples/memory_types.py", ("examples/memory_types.py", "--cupy"), 40, "cupy"),
    Part("benchmarks/main_job.py", ("benchmarks/main_job.py", "--gpu-only", "--quick"), 40, "cupy"),
)


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
    for part in report["parts"]:
        if part["outcome"] in ("failed", "out of time") and part["tail"]:
            fence = "`" * 4
            out.append(f"## {part['name']}\n\n`{part['command']}`\n\n{fence}\n{part['tail'].strip()}\n{fence}")
    return "\n\n".join(out) + "\n"


def run(out: Path, parts: Sequence[Part], env: Mapping[str, str], start: float) -> int:
    """Run the parts, write the report after each, and return the exit code."""
    out.mkdir(parents=True, exist_ok=True)
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
        (out / "gpu.json").write_text(json.dumps(report, indent=1) + "\n")
        (out / "gpu.md").write_text(page(report))
        print(f"{part.name:<26} {result.outcome:<11} {result.wall_s:5.1f} s  {result.why}", flush=True)
    print(f"the report: {out / 'gpu.md'}, {out / 'gpu.json'}")
    outcomes = {part["outcome"] for part in report["parts"]}
    return 1 if outcomes & {"failed", "out of time"} else 3 if "not done" in outcomes else 0


class Wheel(NamedTuple):
    """A wheel that was carried: its file, name, version and what it requires."""

    path: Path
    name: str
    version: str
    requires: tuple[str, ...]


def normal(name: str) -> str:
    """Return a package's name as all spellings of it have it."""
    return name.lower().replace("_", "-").replace(".", "-")


def read_wheel(path: Path) -> Wheel:
    """Read what a wheel says of itself."""
    with zipfile.ZipFile(path) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        said = HeaderParser().parsestr(archive.read(name).decode())
    return Wheel(path, normal(said["Name"]), said["Version"], tuple(said.get_all("Requires-Dist", ())))


def requirements() -> list[str]:
    """Return what hpcgpu and its tests on a GPU require."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    tests = ("hypothesis", "pytest", "pytest-timeout")
    extra = project["optional-dependencies"]["dev"]
    return [*project["dependencies"], *(r for r in extra if r.partition(">")[0] in tests)]


def lacking(wheels: Sequence[Wheel], required: Iterable[str], there: Mapping[str, str]) -> list[Wheel]:
    """Return the wheels to unpack: of what is required, by them too, and not there in such a version.

    What the machine has stays: its NumPy is the one for which its CuPy was built.
    """
    carried, taken = {wheel.name: wheel for wheel in wheels}, {}
    if "packaging" in carried:
        sys.path.append(str(carried["packaging"].path))  # a wheel of Python alone can be imported from
    from packaging.requirements import Requirement

    open_ = list(required)
    while open_:
        wanted = Requirement(open_.pop())
        wheel = carried.get(normal(wanted.name))
        if wheel is None or wheel.name in taken or (wanted.marker and not wanted.marker.evaluate({"extra": ""})):
            continue
        version = there.get(wheel.name)
        if version is None or not wanted.specifier.contains(version, prereleases=True):
            taken[wheel.name] = wheel
            open_ += wheel.requires
    return list(taken.values())


def unpack(folder: Path, site: Path) -> None:
    """Unpack the wheels that this Python lacks, without an index; what was unpacked before goes."""
    shutil.rmtree(site, ignore_errors=True)
    there = {normal(d.metadata["Name"]): d.version for d in metadata.distributions() if d.metadata["Name"]}
    wheels = [read_wheel(path) for path in sorted(folder.glob("*.whl"))]
    # what was named to be carried along is wanted as it is
    wanted = [*requirements(), *((folder / "named").read_text().split("\n") if (folder / "named").exists() else ())]
    chosen = lacking(wheels, filter(None, wanted), there)
    if chosen:
        pip = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-index",
            "--no-deps",
            "--no-compile",
            "--root-user-action=ignore",
        ]
        done = subprocess.run([*pip, "--target", str(site), *(str(wheel.path) for wheel in chosen)], timeout=120)
        if done.returncode:
            version = ".".join(platform.python_version_tuple()[:2])
            sys.exit(
                f"pip could not unpack {folder.name} (its words are above); this is Python {version}. For it: "
                f"scripts/gpu.sh wheels --python {version}"
            )
    names = ", ".join(sorted(wheel.name for wheel in chosen))
    print(f"{len(chosen)} of {len(wheels)} wheels are unpacked{': ' if names else ''}{names}", flush=True)


def fetch(folder: Path, python: str, named: Sequence[str], most_bytes: int = MOST_WHEEL_BYTES) -> int:
    """Fetch wheels for another machine's Python, and see that they can be carried."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    platforms = [f"--platform=manylinux{'_' if '_' in glibc else ''}{glibc}_{platform.machine()}" for glibc in GLIBCS]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--only-binary=:all:"]
    # what is tested here, but for CUDA's own packages: the other machine's driver decides
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("cuda-")]
    (folder / "constraints").write_text("\n".join(pins))
    where = ["--implementation=cp", f"--python-version={python}", *platforms, "-c", str(folder / "constraints")]
    done = subprocess.run([*pip, *where, "-d", str(folder), *requirements(), *named], timeout=600)
    if done.returncode:
        print("pip could not fetch the wheels (its words are above)", file=sys.stderr)
        return 1
    (folder / "named").write_text("\n".join(named))
    sizes = {path.name: path.stat().st_size for path in folder.glob("*.whl")}
    total = sum(sizes.values())
    print(f"{folder.name}: {len(sizes)} wheels for Python {python}, {total / 2**20:.1f} MiB")
    if total <= most_bytes:
        return 0
    biggest = sorted(sizes, key=lambda name: -sizes[name])[:3]
    print(f"{most_bytes / 2**20:.0f} MiB can be carried; the biggest: {', '.join(biggest)}", file=sys.stderr)
    return 1


def environment(folder: Path, site: Path) -> dict[str, str]:
    """Return the variables of the parts; wheels that were carried are unpacked first."""
    if folder.exists():
        unpack(folder, site)
    paths = [str(site)] * folder.exists() + [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    # children that start other Pythons must find the same
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}


def main(argv: Sequence[str]) -> int:
    """Run or fetch, as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="run all parts")
    running.add_argument("--out", type=Path, default=OUT, help="where gpu.json and gpu.md go (%(default)s)")
    running.add_argument("--only", nargs="+", metavar="PART", choices=[p.name for p in PARTS], help="these parts alone")
    fetching = commands.add_parser("wheels", help="fetch what a machine without an index lacks")
    fetching.add_argument("--python", default="3.12", help="the version of the other machine's Python (%(default)s)")
    fetching.add_argument("names", nargs="*", metavar="NAME", help="packages beside hpcgpu's own requirements")
    options = parser.parse_args(argv or ["run"])
    if options.command == "wheels":
        return fetch(WHEELS, options.python, options.names)
    start = time.monotonic()
    parts = [part for part in PARTS if not options.only or part.name in options.only]
    return run(options.out.resolve(), parts, environment(WHEELS, SITE), start)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
