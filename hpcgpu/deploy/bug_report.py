"""Write a folder for a bug report: versions, topology, plan, and a run's record, states and logs, made anonymous.

One private word becomes the same neutral word wherever it stands, so related places remain related.
"""

from __future__ import annotations

import getpass
import grp
import ipaddress
import json
import os
import platform
import pwd
import re
import shlex
import socket
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from hpcgpu import __version__
from hpcgpu.deploy import machine
from hpcgpu.deploy.doctor import probes
from hpcgpu.deploy.jobs import Run, home
from hpcgpu.deploy.jobs.logs import last_lines
from hpcgpu.errors import ConfigError, HpcGpuError, SubmitError
from hpcgpu.host import discover, nvml, private
from hpcgpu.host import run as programs
from hpcgpu.model import Result
from hpcgpu.spill.state.history import STORY

_HEX = "[0-9a-fA-F]"
_PEM = re.compile(r"-----BEGIN [^-]+-----.*?(?:-----END [^-]+-----|\Z)", re.S)
# In hwloc's XML: HostName, DMIProductSerial, NVIDIAUUID, NodeGUID, Port1GID0, Address ...
_INFO = re.compile(
    r'(<info name="[^"]*(?:Serial|UUID|GUID|GID|AssetTag|HostName|Address|LinkUID)[^"]*" value=")([^"]*)(")'
)
# Forms of identifiers, by the kind that their neutral words have.
_FORMS = {
    "mail": re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+"),
    "uuid": re.compile(rf"\b{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}\b"),
    "guid": re.compile(rf"(?<![\w:])(?:0x)?(?:{_HEX}{{4}}:){{3,7}}{_HEX}{{4}}(?![\w:])"),
    "mac": re.compile(rf"(?<![\w:])(?:{_HEX}{{2}}[:-]){{5,19}}{_HEX}{{2}}(?![\w:])"),
    "ip": re.compile(
        rf"(?<![\w.])\d{{1,3}}(?:\.\d{{1,3}}){{3}}(?!\w|\.\d)|(?<![\w:.])(?:{_HEX}{{0,4}}:){{2,7}}{_HEX}{{0,4}}(?![\w:])"
    ),
}
# A variable or key with a secret's name, and its value: NAME=value, "name": "value", ["NAME", "value"].
_NAMED = re.compile(
    r"""(?i)([\w-]*(?:token|secret|passw(?:or)?d|credential|api_?key|private_?key)[\w-]*\\?["']?\s*[=:,]\s*\\?["']?)"""
    r"""([^\s"'\\,;]+)"""
)
# Words that every machine has, which identify nothing.
_COMMON = frozenset({"root", "localhost", "nobody", "user", "users", "home", "none", "tmp"})
_SHORT, _LONG = 3, 6
_VALUE = "(value)"  # in place of values of variables
_LINES, _STORY_LINES = 5000, 20_000  # of each log, from its end
_LOGS = 8
# Variables of batch systems and of sites with an account, or with a path that has a user's name.
_ACCOUNTS = ("SLURM_JOB_ACCOUNT", "SBATCH_ACCOUNT", "SALLOC_ACCOUNT", "PBS_ACCOUNT", "PROJECT")
_PATHS = ("HOME", "SCRATCH", "WORK", "PROJECT", "TMPDIR", "PWD", "VIRTUAL_ENV", "CONDA_PREFIX")
# Lines about a node begin with its name, as host.log.say_of writes them.
_ABOUT_NODE = re.compile(r"^hpcgpu: ([A-Za-z][\w.-]*\d[\w.-]*): ", re.M)
_SEVERAL_NODES = re.compile(r"[A-Za-z][\w.-]*\[[\d,-]+\]")  # node[01-04,7] of Slurm
_SHOWN = 15  # qstat shows this many characters of a name


class Scrubber:
    """Replaces words in texts, the same in all of them; the words are by kind, which their neutral words contain."""

    def __init__(self, secrets: Mapping[str, Iterable[str]]) -> None:
        kinds = [(word, kind) for kind, of_kind in secrets.items() for word in of_kind]
        self._kinds = {word: kind for word, kind in kinds if word.strip() and word.lower() not in _COMMON}
        self._neutral: dict[str, str] = {}
        self._counts: Counter[str] = Counter()
        # short words only where they are whole
        forms = [
            re.escape(word) if len(word) >= _SHORT else rf"(?<![0-9A-Za-z]){re.escape(word)}(?![0-9A-Za-z])"
            for word in sorted(self._kinds, key=len, reverse=True)
        ]
        self._pattern = re.compile("|".join(forms) or "(?!)")  # without words: matches nothing

    def scrub(self, text: str) -> str:
        """Remove the words, and whatever looks like an address, an identifier or a key."""
        text = _PEM.sub("(a key or certificate was here)", text)
        text = _NAMED.sub(lambda m: f"{m[1]}(secret)", text)
        text = _INFO.sub(lambda m: f"{m[1]}{self._value(m[2])}{m[3]}", text)
        text = self._without_forms(text)
        text = self._pattern.sub(lambda m: self._word(m[0], self._kinds[m[0]]), text)
        while self._pattern.search(text):  # a neutral word and what is beside it form another one
            text = self._pattern.sub("", text)
        return text

    def _without_forms(self, text: str) -> str:
        for kind, pattern in _FORMS.items():
            text = pattern.sub(lambda m, kind=kind: self._word(m[0], kind) if _identifies(m[0], kind) else m[0], text)  # type: ignore[misc]
        return text

    def _value(self, value: str) -> str:
        """Return the neutral word for a value whose name alone shows that it identifies something."""
        if not value.strip("0:. "):
            return value
        by_form = self._without_forms(value)
        return by_form if by_form != value else self._word(value, self._kinds.get(value, "value"))

    def _word(self, word: str, kind: str) -> str:
        """Return the neutral word for a word; it contains no word to remove."""
        if word not in self._neutral:
            self._counts[kind] += 1
            number = self._counts[kind]
            candidates = (f"{kind}{number}", f"({number})", "")
            self._neutral[word] = next(c for c in candidates if not self._pattern.search(c))
        return self._neutral[word]


def _identifies(word: str, kind: str) -> bool:
    """Return whether a word of an identifier's form identifies something: not 127.0.0.1, a time, or zeros."""
    if kind != "ip":
        return bool(word.strip("0x:-"))
    try:
        address = ipaddress.ip_address(word)
    except ValueError:
        return False
    return not (address.is_loopback or address.is_unspecified or int(address) in (0, 2**32 - 1))


def write(name: str | None, output: str | None) -> Path:
    """Write the report of a run, or without ``name`` of this machine; return its path; or raise ConfigError."""
    run = Run.find(home(), name) if name else None
    folder = Path(output or "hpcgpu-report")
    try:
        folder.mkdir(mode=0o700, parents=True)
    except OSError as e:
        raise ConfigError(f"{folder} cannot be made: {e.strerror}; give one that is not there yet: --output DIR") from e
    files, hosts = _of_machine(), set[str]()
    if run:
        # of jobs that it lists, and that have ended
        queries = (run.system.status, run.system.history) if run.jobs else ()
        answers = [programs.run_sync(ask(list(run.jobs))) for ask in queries]
        files, hosts = {**files, **_of_run(run, answers)}, _hosts(run, answers)
    hosts.update(node for text in files.values() for node in _ABOUT_NODE.findall(text))
    scrubber = Scrubber(_private_words(run, hosts))
    for file, text in files.items():
        (folder / file).write_text(scrubber.scrub(text))
    (folder / "README.md").write_text(Path(__file__).with_suffix(".md").read_text())
    return folder


def _of_machine() -> dict[str, str]:
    export = next((e for e in discover.exports() if not e.problem), None)
    here = probes.python()
    versions = {
        "hpcgpu": __version__,
        "python": {"version": here.version, "machine": here.machine, "packages": here.packages},
        "kernel": f"{platform.system()} {platform.release()}",
        "libc": " ".join(platform.libc_ver()),
        "hwloc": export.source if export else "",
        "nvidia_driver": nvml.driver(),
    }
    out = {"versions.json": _json(versions)}
    if export:
        out["topology.xml"] = export.text
    else:
        out["topology.txt"] = "no libhwloc 2 or later is on this machine: HPCGPU_LIBHWLOC=/path/to/libhwloc.so.15\n"
    try:
        planned = machine.plan_machine({}, "option --{flag}")
        out |= {"plan.json": _json(planned.described()), "plan.txt": planned.table.to_text()}
    except HpcGpuError as e:
        out["plan.txt"] = f"{e}\n"
    return out


def _hosts(run: Run, answers: Iterable[Result]) -> set[str]:
    """Return the names of the nodes in the batch system's answers."""
    hosts = {node for answer in answers for node in _SEVERAL_NODES.findall(answer.stdout)}
    for answer in answers:
        with suppress(SubmitError):
            listed = run.system.read_status(answer, list(run.jobs))
            hosts.update(host for status in listed.values() for host in status.hosts)
    return hosts


def _of_run(run: Run, answers: Iterable[Result]) -> dict[str, str]:
    """Return its files; the answers are in the form of the recordings in tests/data/batch."""
    record_ = json.loads(private.read(run.folder / "record"))
    record_["document"] = json.loads(record_["document"])
    settings = record_["document"]["settings"]
    if "env" in settings:
        settings["env"] = dict.fromkeys(settings["env"], _VALUE)
    if lines := settings.get("job_script_prologue"):
        settings["job_script_prologue"] = [re.sub("=.*", f"={_VALUE}", line) for line in lines]
    recorded = ""
    for answer in answers:
        recorded += f"$ {shlex.join(answer.argv)}\n[user host] [exit {answer.returncode}]\n"
        for name, text in (("stdout", answer.stdout), ("stderr", answer.stderr)):
            recorded += f"--- {name}\n{text}" + ("\n" if text and text[-1] != "\n" else "")
        recorded += "===\n"
    out = {"record.json": _json(record_), "batch.txt": recorded}
    for number, job in enumerate([*run.jobs.values()][:_LOGS]):
        lines = last_lines(Path(job.log), _LINES + _STORY_LINES)[0].splitlines(keepends=True)
        stories = [line for line in lines if STORY in line]
        out[f"job-{number}.log"] = "".join([line for line in lines if STORY not in line][-_LINES:])
        if stories:
            out[f"job-{number}-spill.log"] = "".join(stories)
    return out


def _private_words(run: Run | None, nodes: Iterable[str]) -> dict[str, list[str]]:
    """Return the private words that the report must not contain, by kind."""
    users, homes, groups = _names_here()
    hosts = {*nodes, socket.gethostname(), socket.getfqdn(), socket.gethostname().partition(".")[0]}
    names = {
        "user": users,
        "group": [name for name in groups if name not in users[:1]],
        "account": [value for name in _ACCOUNTS if (value := os.environ.get(name, ""))],
        "path": [str(Path.home()), *homes, *(os.environ[name] for name in _PATHS if name in os.environ)],
        "host": sorted(hosts),
        "secret": [],
    }
    with suppress(OSError, KeyError):
        names["user"].append(getpass.getuser())
    if run:
        # not by its parser: the report may be about a document that this hpcgpu cannot read
        settings = json.loads(run.record.document)["settings"]
        names["account"] += filter(None, [settings.get("account")])
        values = [*settings.get("env", {}).values()]
        values += [line.partition("=")[2].strip("'\"") for line in settings.get("job_script_prologue", ())]
        names["secret"] += [value for value in values if len(value) >= _LONG]  # in logs; short ones are no secrets
        names["path"] += [str(run.folder.parent.parent)]
        names["host"] += [run.owner.host, *filter(None, (job_id.partition(".")[2] for job_id in run.jobs))]  # servers
        names["user"] += [name[:_SHOWN] for name in names["user"] if len(name) > _SHOWN]
        with suppress(OSError, HpcGpuError):  # private files of a run that still exist
            names["secret"] += [private.read(run.folder / "nonce").strip()]
        with suppress(OSError, HpcGpuError, ValueError):
            facts = json.loads(private.read(run.folder / "scheduler"))
            names["secret"] += [str(facts[name]) for name in ("dashboard_secret", "nonce", "node") if facts.get(name)]
    names["path"] = [path for path in names["path"] if path not in ("/", "/root", "/tmp", "/home")]
    return names


def _names_here() -> tuple[list[str], list[str], list[str]]:
    """Return names, homes and groups of this user; a container knows few, and a directory service may be away."""
    users, homes, groups = list[str](), list[str](), list[str]()
    with suppress(KeyError):
        me = pwd.getpwuid(os.getuid())
        users, homes = [me.pw_name, *filter(None, me.pw_gecos.split(","))], [me.pw_dir]
    for gid in filter(None, os.getgroups()):
        with suppress(KeyError):
            groups.append(grp.getgrgid(gid).gr_name)
    return users, homes, groups


def _json(facts: object) -> str:
    return json.dumps(facts, indent=2, default=str) + "\n"
