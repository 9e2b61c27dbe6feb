"""The memory that PBS has granted a job: read of what a real one says of jobs, and told to their ranks."""

from __future__ import annotations

import pytest
from paths import BATCH
from recordings import Record, block, listing, recorded, records

from hpcgpu.batch import pbs
from hpcgpu.errors import SubmitError
from hpcgpu.launch import read_allocation, render_memory
from hpcgpu.model import Result

MIB, GIB = 1 << 20, 1 << 30


def granted(record: Record) -> dict[str, int]:
    return dict(pbs.read_memory(Result((), record.returncode, record.stdout, record.stderr)))


def granted_of(exec_host: str, exec_vnode: str, build: str) -> dict[str, int]:
    fields = {"exec_host": f'"{exec_host}"', "exec_vnode": f'"{exec_vnode}"', "mem": '"12gb"'}
    return dict(pbs.read_memory(Result((), 0, listing(build, [block(build, "7.login01", "R", fields)]))))


def test_what_each_node_is_granted_is_read() -> None:
    differ, packed, one, element, whole = map(granted, records(BATCH / "pbs/head/38-memory-granted.txt"))
    assert differ == {"node1": 2 * GIB, "node2": GIB}
    assert packed == {"node1": 600 * MIB}  # two chunks on one node
    assert one == {"node1": GIB, "node2": 0}  # the second chunk has no mem=
    assert element == {"node1": 500 * MIB}
    assert whole == {"node1": 450 * MIB, "node2": 450 * MIB}  # resources_default.mem, of all nodes together


@pytest.mark.parametrize("build", ["head", "release"])
def test_both_builds_say_it(build: str) -> None:
    assert granted(recorded(build, "05-qstat-json-R", 0)) == {"node0001": 2 * GIB, "node0002": 2 * GIB}
    for state in ("06-qstat-json-Q", "14-array"):  # it waits; one without mem=
        assert granted(recorded(build, state, 0 if "Q" in state else 3)) == {}


@pytest.mark.parametrize("build", ["head", "release"])
def test_vnodes_count_for_their_host(build: str) -> None:
    hosts = "node0003/0*8+node0004/0*0"
    vnodes = "(node0003:ncpus=8:mem=4194304kb)+(node0004[0]:ngpus=2:mem=3gb+node0004[1]:mem=1024mb:ngpus=2)"
    assert granted_of(hosts, vnodes, build) == {"node0003": 4 * GIB, "node0004": 4 * GIB}
    assert granted_of(hosts, "(node0003:ncpus=8:mem=4gb)", build) == {}  # of another form than any that was seen
    assert granted_of("n1/0", "(n1:mem=512)", build) == {"n1": 512}
    assert granted_of("n1/0", "(n1:mem=512mw)", build) == {"n1": 4 * GIB}


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (Result((), 127, "", "qstat: there is no such program on this machine"), "there is no such program"),
        (Result((), 124, "", "qstat: no answer in 10 s; it was killed\n"), "no answer in 10 s"),
        (Result((), 153, listing("head", []), "qstat: Unknown Job Id 7.login01\n"), "Unknown Job Id 7.login01$"),
        (Result((), 0, "", ""), "exit code 0, no job"),
    ],
)
def test_no_answer_is_an_error_in_qstats_words(result: Result, words: str) -> None:
    with pytest.raises(SubmitError, match=f"(?m){words}"):
        pbs.read_memory(result)


def told(by_host: dict[str, int], host: str) -> int | None:
    environ = {"PBS_JOBID": "7.login01", "HPCGPU_GRANTED_MEMORY": render_memory(by_host)}
    found = read_allocation(environ, host).memory
    assert found is None or found.source == "mem= of PBS job 7.login01"
    return found.nbytes if found else None


def test_each_rank_reads_what_its_node_has() -> None:
    assert told({}, "n1") is None
    assert render_memory({"n1": GIB, "n2": GIB}) == str(GIB)
    assert {told({"n1": GIB, "n2": GIB}, host) for host in ("n1", "n2.site", "x", "")} == {GIB}
    differ = {"n1": 2 * GIB, "n2": GIB, "n3": 0}
    assert [told(differ, host) for host in ("n1", "n2.site.edu", "n3")] == [2 * GIB, GIB, None]
    assert told(differ, "known-by-another-name") == told(differ, "") == GIB
    assert read_allocation({"PBS_JOBID": "7.login01", "HPCGPU_GRANTED_MEMORY": "n1=2gb,?"}, "n1").memory is None
    assert read_allocation({"HPCGPU_GRANTED_MEMORY": "5"}).memory is None
