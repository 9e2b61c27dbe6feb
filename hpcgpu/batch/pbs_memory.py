"""Ask PBS for the memory that it has granted a job: no variable in the job has it.

The cgroups hook, if a site has it, enforces this limit on each node. Otherwise nothing does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from hpcgpu.batch.pbs_answers import hosts, listed
from hpcgpu.errors import SubmitError
from hpcgpu.model import Command, Result

# A server that hangs does not answer (33-server-trouble), and this job's ranks wait meanwhile.
_TIMEOUT_S = 10.0
_CHUNK = re.compile(r"\(([^()]*)\)")
_MEM = re.compile(r":mem=([^:+]+)")
_SIZE = re.compile(r"(\d+)([kmgtp]?)([bw]?)", re.IGNORECASE)


def ask(job_id: str) -> Command:
    """Return the qstat for one running job, which may be an array's element."""
    return Command(("qstat", "-f", "-F", "json", job_id), timeout_s=_TIMEOUT_S)


def read(result: Result) -> Mapping[str, int]:
    """Return the granted bytes of each host, 0 for a host without; empty if no host has any. Raises SubmitError."""
    # A host may have several chunks, and a chunk several vnodes of its host, with other names. Memory of the whole job,
    # by resources_default.mem, is in no chunk: the hosts have equal parts of it.
    _, fields = next(listed(result.stdout), ("", None))
    if fields is None:
        said = result.stderr.strip() or f"exit code {result.returncode}, and no job"
        raise SubmitError(f"qstat did not answer: {said}", evidence=said)
    on = hosts(fields)
    chunks = _CHUNK.findall(fields.get("exec_vnode", ""))
    if not on or len(on) != len(chunks):
        return {}
    granted = dict.fromkeys(on, 0)
    for host, chunk in zip(on, chunks, strict=True):
        granted[host] += sum(map(_size_bytes, _MEM.findall(chunk)))
    if not any(granted.values()):
        granted = dict.fromkeys(granted, _size_bytes(fields.get("Resource_List.mem", "")) // len(granted))
    return granted if any(granted.values()) else {}


def _size_bytes(text: str) -> int:
    """Return the bytes of a PBS size, ``2097152kb``; 0 if invalid. Units are powers of 1024, a word has 8 bytes."""
    found = _SIZE.fullmatch(text)
    if not found:
        return 0
    power = " kmgtp".index(found[2].lower() or " ")
    return (int(found[1]) << 10 * power) * (8 if found[3] in ("w", "W") else 1)
