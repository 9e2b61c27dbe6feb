"""The memory that PBS has granted a job: no variable tells it in the job.

The cgroups hook, where a site has it, limits a job to this on each node. Elsewhere nothing does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from hpcgpu.batch.pbs_answers import hosts, listed
from hpcgpu.errors import SubmitError
from hpcgpu.model import Command, Result

# A server that hangs answers nobody (33-server-trouble), and this job's ranks wait meanwhile.
_TIMEOUT_S = 10.0
_CHUNK = re.compile(r"\(([^()]*)\)")
_MEM = re.compile(r":mem=([^:+]+)")
_SIZE = re.compile(r"(\d+)([kmgtp]?)([bw]?)", re.IGNORECASE)


def ask(job_id: str) -> Command:
    """Return the qstat for one running job, which may be an array's element."""
    return Command(("qstat", "-f", "-F", "json", job_id), timeout_s=_TIMEOUT_S)


def read(result: Result) -> Mapping[str, int]:
    """Return the bytes that are granted of each host; 0 where none are said, and nothing where no host has any.

    A host may have several chunks, and a chunk several vnodes of its host, whose names are not the host's. What the
    job has as a whole, by ``resources_default.mem``, stands in no chunk: hosts have equal parts of it.

    Raises
    ------
    SubmitError
        qstat did not answer.

    """
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
    """Return a size of PBS, ``2097152kb``: its units are powers of 1024, and a word has 8 bytes; 0 if it is none."""
    found = _SIZE.fullmatch(text)
    if not found:
        return 0
    power = " kmgtp".index(found[2].lower() or " ")
    return (int(found[1]) << 10 * power) * (8 if found[3] in ("w", "W") else 1)
