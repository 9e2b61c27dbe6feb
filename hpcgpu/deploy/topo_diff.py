"""The differences between machines: those of files, or the nodes of this job.

The nodes answer on one stream, in lines that stay whole.
"""

from __future__ import annotations

import base64
import binascii
import json
import secrets
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

from hpcgpu.deploy import start
from hpcgpu.deploy.topo import named, parse_topology, read_text
from hpcgpu.errors import ConfigError, LaunchError
from hpcgpu.host import process
from hpcgpu.host import run as programs
from hpcgpu.model import Command
from hpcgpu.plan.views.describe import describe, differences

_NODES_TIMEOUT_S = 120.0
_MARK = "hpcgpu-answer"
# srun passes a longer line on in pieces of 1,024 bytes, with other nodes' pieces between them (Slurm 22.05, seen with
# lines of 7 kB). Open MPI passes on as much as it finds, up to 4,096 bytes: a multiple of this.
LINE_BYTES = 512
_PAYLOAD = 448


def compare(files: Sequence[str]) -> tuple[str, bool]:
    """Return the differences between machines, those of files or this job's nodes, and whether there are any.

    Raises
    ------
    ConfigError, ParseError, LaunchError
        One machine only, a file that cannot be read, or nodes that do not answer.

    """
    if twice := next((name for name in files if files.count(name) > 1), ""):
        raise ConfigError(f"--diff compares machines, and {named(twice)} was given twice; give a file of each machine")
    nodes = {named(name): read_described(name) for name in files} if files else _nodes_of_the_job()
    if len(nodes) < 2:
        raise ConfigError(
            f"--diff compares machines, and there {'is one' if nodes else 'are none'}: start it in a job with several "
            "nodes, or give files (hpcgpu topo --json > node.json on each)"
        )
    found = differences(nodes)
    count = f"{len(found)} difference{'' if len(found) == 1 else 's'}" if found else "all alike"
    return "\n".join([*found, f"{len(nodes)} nodes, {count}", ""]), bool(found)


def _nodes_of_the_job() -> dict[str, dict[str, Any]]:
    launch = start.node_launch(process.python_argv("hpcgpu", "topo", "--answer"))
    argv = launch.argv
    done = programs.run_sync(Command(argv, env=dict(launch.env), timeout_s=_NODES_TIMEOUT_S))
    if done.returncode != 0:
        raise LaunchError(f"{' '.join(argv)} ended with {done.returncode}: {done.stderr.strip()}")
    try:
        found = [parse_described(text, "a node's answer") for text in read_answers(done.stdout.splitlines())]
    except ValueError as e:
        raise LaunchError(f"{' '.join(argv)}: {e}; it printed: {done.stdout[-2000:]}") from e
    by_host = {node["machine"]["host"]: node for node in found}
    return {host: by_host[host] for host in sorted(by_host)}  # nodes answer in any order


def read_described(name: str) -> dict[str, Any]:
    """Return the machine of an XML file, or of JSON of ``hpcgpu topo``, as :func:`describe` returns it.

    Raises
    ------
    ConfigError, ParseError
        As :func:`read_machine`.

    """
    text = read_text(name)
    return (
        parse_described(text, named(name))
        if text.lstrip().startswith("{")
        else describe(parse_topology(text, name), ())
    )


def parse_described(text: str, where: str) -> dict[str, Any]:
    """Return what ``hpcgpu topo --json`` printed.

    Raises
    ------
    ConfigError
        The text is something else.

    """
    expected = "expected what hpcgpu topo --json prints"
    try:
        found = json.loads(text)
        differences({"a": found, "b": found})
    except json.JSONDecodeError as e:
        raise ConfigError(f"{where}, line {e.lineno}: no JSON ({e.msg}); {expected}") from e
    except KeyError as e:
        raise ConfigError(f"{where} has no {e.args[0]!r} where one belongs; {expected}") from e
    except (ValueError, TypeError, AttributeError, RecursionError) as e:
        raise ConfigError(f"{where} has a value of another kind than belongs there; {expected}") from e
    return dict(found)


def answer_lines(text: str) -> list[str]:
    """Return a text as lines of ``LINE_BYTES`` each, with their line ends; write each by one call."""
    packed = base64.b64encode(zlib.compress(text.encode())).decode()
    pieces = [packed[i : i + _PAYLOAD] for i in range(0, len(packed), _PAYLOAD)]
    name = secrets.token_hex(8)
    said = (f"{_MARK} {name} {number} {len(pieces)} {piece}" for number, piece in enumerate(pieces))
    return [f"{line:<{LINE_BYTES - 1}}\n" for line in said]


def read_answers(stream: Iterable[str]) -> list[str]:
    """Return the texts whose lines are in a stream, in any order and among other lines.

    Raises
    ------
    ValueError
        Lines of a text are missing or changed.

    """
    found: dict[str, dict[int, str]] = {}
    counts: dict[str, int] = {}
    for line in stream:
        if line.startswith(_MARK + " "):
            _, name, number, count, piece = line.split()
            found.setdefault(name, {})[int(number)] = piece
            counts[name] = int(count)
    for name, pieces in found.items():
        if len(pieces) != counts[name]:
            raise ValueError(f"of {counts[name]} lines of an answer {len(pieces)} have come")
    joined = ("".join(pieces[i] for i in range(len(pieces))) for pieces in found.values())
    try:
        return [zlib.decompress(base64.b64decode(text, validate=True)).decode() for text in joined]
    except (KeyError, binascii.Error, zlib.error) as e:
        raise ValueError(f"an answer has changed on its way ({e})") from e
