"""Recorded outputs of real batch systems, and what qstat prints of jobs, with ids and fields put in."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from paths import BATCH

_RECORD = re.compile(r"\$ (.*?)\n\[\w+ \w+\] \[exit (\d+)\]\n--- stdout\n(.*?)--- stderr\n?(.*)", re.S)
DATA = BATCH / "pbs"
SERVER = "login01"
HEADER = re.compile(r'^([ \t]*)"(\d+(?:\[\d*\])?\.login01)"\s*:\s*\{$', re.M)
# What is printed of a job in each state, by build: (file, record, id). An element's are those of array 1031.
STATES = {
    **{state: (f"0{5 + i}-qstat-json-{state}", 0) for i, state in enumerate("RQHW")},
    **{"E": ("09-qstat-json-E", 0), "F": ("11-qstat-finished", 3), "B": ("14-array", 2)},
    **{"[Q]": ("14-array", 3), "[R]": ("14-array", 3), "[X]": ("14-array", 3)},
}
ELEMENTS = {"[Q]": "1031[9]", "[R]": "1031[0]", "[X]": "1031[3]"}


@dataclass(frozen=True)
class Record:
    """One command that was run, and what came of it."""

    command: str
    returncode: int
    stdout: str
    stderr: str


def records(path: Path) -> Iterator[Record]:
    """Read ``$ command`` / ``[user host] [exit n]`` / ``--- stdout`` / ``--- stderr`` / ``===`` blocks."""
    text = path.read_text(encoding="utf-8", errors="replace").removesuffix("===\n")
    for block in text.split("\n===\n"):
        if not block.strip():
            continue
        match = _RECORD.match(block)
        if not match:
            raise ValueError(f"{path}: not a record: {block[:80]!r}")
        yield Record(match[1], int(match[2]), match[3], match[4])


def blocks(text: str) -> dict[str, str]:
    """Return what is printed of each job, by id, without the comma after it."""
    by_id = {}
    for header in HEADER.finditer(text):
        end = re.compile(rf"^{header[1]}\}}", re.M).search(text, header.end())
        by_id[header[2]] = text[header.start() : end.end()]
    return by_id


def recorded(build: str, file: str, number: int) -> Record:
    return next(r for i, r in enumerate(records(DATA / build / f"{file}.txt")) if i == number)


def quirks() -> Iterator[str]:
    """Yield what is printed of other people's jobs that is no JSON: bare words, bytes that are no UTF-8."""
    for record in records(DATA / "release" / "16-json-quirks.txt"):
        yield from blocks(record.stdout).values()


def listing(build: str, jobs: Iterable[str]) -> str:
    """Return the whole of qstat's JSON for what is printed of each job."""
    shown = ",\n".join(jobs)
    if not shown:
        return recorded(build, "11-qstat-finished", 1).stdout
    text = recorded(build, "05-qstat-json-R", 0).stdout
    (first,) = blocks(text).values()
    return text.replace(first, shown)


def block(build: str, job_id: str, state: str, fields: Mapping[str, str]) -> str:
    """Return what is printed of a job in a state; ``fields`` are JSON, and replace what was recorded."""
    element = re.search(r"\[\d+\]", job_id)
    key = {"F": "[X]", "E": "[R]", "H": "[Q]"}.get(state, f"[{state}]") if element else state
    file, number = STATES["B" if "[]" in job_id else key]
    of = blocks(recorded(build, file, number).stdout)
    text = of[f"{ELEMENTS[key]}.{SERVER}"] if element else next(iter(of.values()))
    text = text.replace(next(iter(blocks(text))), job_id)
    for name, value in (("job_state", json.dumps(state)), *fields.items()):
        line = rf'^([ \t]*"{name}"\s*:\s*)(.*?)(,?)$'
        text, count = re.subn(line, lambda m, v=value: f"{m[1]}{v}{m[3]}", text, count=1, flags=re.M)
        if not count:
            more = f'"{name}":{value},'
            text = re.sub(r'^([ \t]*)"job_state".*$', lambda m, v=more: f"{m[0]}\n{m[1]}{v}", text, count=1, flags=re.M)
    return text
