"""What qstat prints of jobs as JSON, which it does not always manage to be."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from datetime import datetime

ID = r"\d+(?:\[\d*\])?\.[\w.-]+"
# qstat's JSON is read line by line, since it is not always JSON: a bare nan or .5 anywhere in a job, one byte
# that is no UTF-8, an empty value that takes in the next (16-json-quirks, 18-json-values; OpenPBS 23.06.06).
_HEADER = re.compile(rf'[ \t]*"({ID})"\s*:\s*{{\s*')
_WITHIN = frozenset({("estimated", "start_time"), ("Resource_List", "mem")})
_FIELD = re.compile(r'([ \t]*)"([^"]*)"\s*:\s*(.*?),?\s*')


def listed(text: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield each job's id and its own fields; those of its environment stand further in.

    Of what stands further in only ``estimated.start_time`` and ``Resource_List.mem`` are taken.
    """
    job_id, indent, inside, fields = "", "", "", dict[str, str]()
    for line in text.splitlines():
        if found := _HEADER.fullmatch(line):
            if job_id:
                yield job_id, fields
            job_id, indent, inside, fields = found[1], "", "", {}
        elif job_id and (found := _FIELD.fullmatch(line)):
            indent = indent or found[1]
            if found[1] == indent:
                inside = found[2] if found[3] == "{" else ""
                fields.setdefault(found[2], _text(found[3]))
            elif (inside, found[2]) in _WITHIN:
                fields.setdefault(f"{inside}.{found[2]}", _text(found[3]))
    if job_id:
        yield job_id, fields


def hosts(fields: Mapping[str, str]) -> list[str]:
    """Return the host of each chunk of a job: ``node1/0*2+node2/0*2``."""
    return [word.partition("/")[0] for word in fields.get("exec_host", "").split("+") if word]


def moment(text: str) -> str:
    """Return a time as Slurm writes it, in local time; it is in seconds or in words, such as all others."""
    try:
        at = datetime.fromtimestamp(int(text)) if text.isdigit() else datetime.strptime(text, "%a %b %d %H:%M:%S %Y")
    except (ValueError, OverflowError):
        return text
    return at.isoformat()


def _text(value: str) -> str:
    if len(value) < 2 or value[0] != '"':
        return value
    try:
        return str(json.loads(value, strict=False))
    except ValueError:
        return value[1:-1]
