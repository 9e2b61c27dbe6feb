"""The name of a worker says which job it belongs to, whatever the batch system calls its jobs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcgpu.plan.jobs import count_by_job, member_worker_name, read_member_name

NUMBERS = st.integers(0, 10**7)
SERVERS = st.from_regex(r"[a-z0-9]([a-z0-9_.-]{0,20}[a-z0-9])?", fullmatch=True)
SLURM_IDS = st.one_of(NUMBERS.map(str), st.builds("{}_{}".format, NUMBERS, NUMBERS))
PBS_IDS = st.one_of(
    st.builds("{}.{}".format, NUMBERS, SERVERS), st.builds("{}[{}].{}".format, NUMBERS, NUMBERS, SERVERS)
)


@given(st.one_of(SLURM_IDS, PBS_IDS), st.integers(0, 99), st.integers(0, 999))
def test_a_name_says_what_it_was_made_of(job_id: str, restart_count: int, index: int) -> None:
    name = member_worker_name(job_id, restart_count, index)
    assert read_member_name(name) == (job_id, restart_count, index)


@pytest.mark.parametrize(
    ("name", "job_id"),
    [
        ("123_4-0", "123_4"),
        ("123_4-0r1", "123_4"),
        ("17[4].server-0", "17[4].server"),
        ("17.master1-0", "17.master1"),  # a server whose name ends like a restart
        ("17.pbs-0r1-3", "17.pbs-0r1"),
        *((name, None) for name in ("node1-0", "gpu-17-3", "123_4", "123_4-", "123_4-r1", "-0", "", "१२-0", "17[]-0")),
    ],
)
def test_read_member_name(name: str, job_id: str | None) -> None:
    member = read_member_name(name)
    assert (member[0] if member else None) == job_id


@given(st.text(max_size=20))
def test_read_member_name_of_any_text(text: str) -> None:
    member = read_member_name(text)
    assert not member or read_member_name(member_worker_name(*member)) == member


def test_count_by_job() -> None:
    names = ["node1-0", "node1-1", "7-0", "7-1r1", "8-0", "1234-0"]  # the last of a node of that name
    assert count_by_job(names, {"7", "8"}, "6") == {"6": 3, "7": 2, "8": 1}
