"""Write a folder for a bug report: versions, topology, plan, and a run's record, states and logs, made anonymous."""

from __future__ import annotations

import asyncio
import getpass
import grp
import json
import os
import platform
import pwd
import re
import shlex
import socket
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpcgpu import __version__
from hpcgpu.deploy import topo
from hpcgpu.deploy.doctor import probes
from hpcgpu.deploy.jobs import logs
from hpcgpu.deploy.jobs.run import Run, home
from hpcgpu.errors import ConfigError, HpcGpuError, SubmitError
from hpcgpu.host import libhwloc, nvml, private
from hpcgpu.host import run as programs
from hpcgpu.model import Result
from hpcgpu.report.scrub import Scrubber

_LINES = 5000  # of each log, from its end
_LOGS = 8
# Variables of batch systems and of sites with an account, or with a path that has a user's name.
_ACCOUNTS = ("SLURM_JOB_ACCOUNT", "SBATCH_ACCOUNT", "SALLOC_ACCOUNT", "PBS_ACCOUNT", "PROJECT")
_PATHS = ("HOME", "SCRATCH", "WORK", "PROJECT", "TMPDIR", "PWD", "VIRTUAL_ENV", "CONDA_PREFIX")
# Lines about a node begin with its name, as host.log.say_of writes them.
_ABOUT_NODE = re.compile(r"^hpcgpu: ([A-Za-z][\w.-]*\d[\w.-]*): ", re.M)
_SEVERAL_NODES = re.compile(r"[A-Za-z][\w.-]*\[[\d,-]+\]")  # node[01-04,7] of Slurm
_SHOWN = 15  # qstat shows this many characters of a name
_README = """\
The facts that `hpcgpu report` has gathered. Names of users, groups, hosts and accounts, the user's paths, addresses,
UUIDs and serial numbers are replaced by neutral words, the same in all files; keys and environments are not in it.
Look through it before you hand it on: names that hpcgpu cannot know of, such as those of your data, may be in logs.

- versions.json: hpcgpu, Python, packages, kernel, driver
- topology.xml: this machine as hwloc sees it; `hpcgpu topo --from topology.xml` plans for it. topology.txt in its
  place has the reason if it is missing.
- plan.json, plan.txt: the output of `hpcgpu topo` for it
- record.json, batch.txt, job-N.log: of the run that was named: all its settings, the batch system's answers about its
  jobs, and their logs' ends

The folder is a test as it is: in tests/data/reports hpcgpu's own parsers must read all of it.
"""


def write(name: str | None, output: str | None) -> Path:
    """Write the report of a run, or without ``name`` of this machine; return its path; or raise ConfigError."""
    run = Run.find(home(), name) if name else None
    folder = Path(output or "hpcgpu-report")
    try:
        folder.mkdir(mode=0o700, parents=True)
    except OSError as e:
        raise ConfigError(
            f"{folder} cannot be made: {e.strerror}; give a folder that is not there yet: --output DIR"
        ) from e
    answers = asyncio.run(_answers(run)) if run else ()
    files = {**_of_machine(), **(_of_run(run, answers) if run else {})}
    nodes = {node for text in files.values() for node in _ABOUT_NODE.findall(text)}
    scrubber = Scrubber(_private_words(run, nodes | (_hosts(run, answers) if run else set())))
    for file, text in files.items():
        (folder / file).write_text(scrubber.scrub(text))
    (folder / "README.md").write_text(_README)
    return folder


def _of_machine() -> dict[str, str]:
    export = next((e for e in libhwloc.exports() if not e.problem), None)
    out = {"versions.json": _json(_versions(export.source if export else ""))}
    if export:
        out["topology.xml"] = export.text
    else:
        out["topology.txt"] = "no libhwloc 2 or later is on this machine: HPCGPU_LIBHWLOC=/path/to/libhwloc.so.15\n"
    try:
        planned = topo.plan(topo.Selection(), {}, "option --{flag}")
        out |= {"plan.json": _json(planned.described()), "plan.txt": planned.table.to_text()}
    except HpcGpuError as e:
        out["plan.txt"] = f"{e}\n"
    return out


def _versions(hwloc: str) -> dict[str, Any]:
    here = probes.python()
    python = {"version": here.version, "machine": here.machine, "packages": here.packages}
    kernel = f"{platform.system()} {platform.release()}"
    libc = " ".join(platform.libc_ver())
    versions = {"hpcgpu": __version__, "python": python, "kernel": kernel, "libc": libc, "hwloc": hwloc}
    return {**versions, "nvidia_driver": nvml.driver()}


async def _answers(run: Run) -> tuple[Result, ...]:
    """Return the batch system's answers on the jobs: those that it lists, and those that have ended."""
    ids = list(run.jobs)
    asked = (run.system.status, run.system.history)
    return tuple([await programs.run(ask(ids)) for ask in asked]) if ids else ()


def _hosts(run: Run, answers: Iterable[Result]) -> set[str]:
    """Return the names of the nodes in the batch system's answers."""
    hosts = {node for answer in answers for node in _SEVERAL_NODES.findall(answer.stdout)}
    for answer in answers:
        with suppress(SubmitError):
            listed = run.system.read_status(answer, list(run.jobs))
            hosts.update(host for status in listed.values() for host in status.hosts)
    return hosts


def _recorded(answers: Iterable[Result]) -> str:
    """Return answers in the form of the recordings in tests/data/batch."""
    return "".join(
        f"$ {shlex.join(a.argv)}\n[user host] [exit {a.returncode}]\n--- stdout\n{_whole_lines(a.stdout)}--- stderr\n"
        f"{_whole_lines(a.stderr)}===\n"
        for a in answers
    )


def _whole_lines(text: str) -> str:
    return f"{text}\n" if text and not text.endswith("\n") else text


def _of_run(run: Run, answers: Iterable[Result]) -> dict[str, str]:
    record_ = json.loads(private.read(run.folder / "record"))
    record_["document"] = json.loads(record_["document"])
    out = {"record.json": _json(record_), "batch.txt": _recorded(answers)}
    for number, job in enumerate([*run.jobs.values()][:_LOGS]):
        text, _ = logs.last(Path(job.log), _LINES)
        out[f"job-{number}.log"] = text
    return out


def _private_words(run: Run | None, nodes: Iterable[str]) -> dict[str, list[str]]:
    """Return the private words that the report must not contain, by kind."""
    me = pwd.getpwuid(os.getuid())
    groups = [grp.getgrgid(gid).gr_name for gid in os.getgroups() if gid]
    hosts = {*nodes, socket.gethostname(), socket.getfqdn(), socket.gethostname().partition(".")[0]}
    names = {
        "user": [me.pw_name, *filter(None, me.pw_gecos.split(","))],
        "group": [name for name in groups if name != me.pw_name],
        "account": [value for name in _ACCOUNTS if (value := os.environ.get(name, ""))],
        "path": [str(Path.home()), me.pw_dir, *(os.environ[name] for name in _PATHS if name in os.environ)],
        "host": sorted(hosts),
        "secret": [],
    }
    with suppress(OSError, KeyError):
        names["user"].append(getpass.getuser())
    if run:
        # not by its parser: the report may be about a document that this hpcgpu cannot read
        account = json.loads(run.record.document)["settings"].get("account")
        names["account"] += [account] if account else []
        names["path"] += [str(run.folder.parent.parent)]
        names["host"] += [run.owner.host]
        names["host"] += [server for job_id in run.jobs if (server := job_id.partition(".")[2])]  # of PBS
        names["user"] += [name[:_SHOWN] for name in names["user"] if len(name) > _SHOWN]
        names["secret"] += list(_secrets(run.folder))
    names["path"] = [path for path in names["path"] if path not in ("/", "/root", "/tmp", "/home")]
    return names


def _secrets(folder: Path) -> Iterator[str]:
    """Yield the secrets in the run's private files that still exist."""
    with suppress(OSError, HpcGpuError):
        yield private.read(folder / "nonce").strip()
    with suppress(OSError, HpcGpuError, ValueError):
        facts = json.loads(private.read(folder / "scheduler"))
        yield from (str(facts[name]) for name in ("dashboard_secret", "nonce", "node") if facts.get(name))


def _json(facts: object) -> str:
    return json.dumps(facts, indent=2, default=str) + "\n"
