"""What differs between machines: those of files, or the nodes of this job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpcgpu.deploy import answers, start
from hpcgpu.deploy.topo_files import named, parse_described, read_described
from hpcgpu.errors import ConfigError, LaunchError
from hpcgpu.host import process
from hpcgpu.host import run as programs
from hpcgpu.model import Command
from hpcgpu.plan.views.describe import differences

_NODES_TIMEOUT_S = 120.0


def compare(files: Sequence[str]) -> tuple[str, bool]:
    """Return what differs between machines, those of files or this job's nodes, and whether anything does.

    Raises
    ------
    ConfigError, ParseError, LaunchError
        One machine only, a file that cannot be read, or nodes that do not answer.

    """
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
        found = [parse_described(text, "a node's answer") for text in answers.texts(done.stdout.splitlines())]
    except ValueError as e:
        raise LaunchError(f"{' '.join(argv)}: {e}; it printed: {done.stdout[-2000:]}") from e
    by_host = {node["machine"]["host"]: node for node in found}
    return {host: by_host[host] for host in sorted(by_host)}  # they answer in any order
