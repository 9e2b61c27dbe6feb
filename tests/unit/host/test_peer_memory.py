"""Memory of other processes: proofs, copies, and the reasons against them."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcgpu.host import host_memory
from hpcgpu.host.host_memory import Identity, Proofs

CHILD = """
import sys
from hpcgpu.host.host_memory import Identity
print(dict(Identity.of_this_process()._asdict()), flush=True)
sys.stdin.read()
"""


def test_identity_of_a_child_is_proved_and_of_a_dead_one_not() -> None:
    with subprocess.Popen([sys.executable, "-c", CHILD], stdin=-1, stdout=-1, text=True) as child:
        peer = Identity.parse(eval(child.stdout.readline()))
        assert peer
        assert peer.refusal() == ""
        assert peer._replace(nonce=bytes(32)).refusal() == host_memory.ENDED  # another process has its pid
        assert peer._replace(host="elsewhere").refusal() == "another host, or another pid namespace"
        assert peer._replace(address=4096).refusal() == "process_vm_readv: Bad address"
        child.communicate("")
    assert peer.refusal() == host_memory.ENDED


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_memory_of_another_user_is_refused_with_the_reason() -> None:
    peer = Identity.of_this_process()
    reads, writes = os.pipe()
    if (pid := os.fork()) == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        os.write(writes, peer.refusal().encode())
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(writes)
    with os.fdopen(reads) as f:
        assert f.read() == "process_vm_readv: Operation not permitted (another user, or a container's rules)"


VALUES = st.none() | st.booleans() | st.integers(-5, 2**70) | st.text(max_size=4) | st.binary(max_size=40)


@given(st.none() | VALUES | st.dictionaries(st.sampled_from([*Identity._fields, "x"]), VALUES))
def test_parse_takes_an_identity_or_gives_none(value: object) -> None:
    peer = Identity.parse(value)
    assert peer is None or (peer.pid > 0 and len(peer.nonce) == 32 and isinstance(peer.refusal(), str))


def test_copy_fails_for_bytes_that_were_given_up() -> None:
    proofs, lent, out = Proofs(2), ctypes.create_string_buffer(b"bytes"), bytearray(5)
    pairs = [(ctypes.addressof(lent), memoryview(out))]
    first, second = proofs.begin(), proofs.begin()
    assert first
    assert second
    assert proofs.begin() is None
    host_memory.copy(os.getpid(), pairs, first)
    assert out == b"bytes"
    proofs.end(first[0])
    with pytest.raises(OSError, match="given up") as caught:
        host_memory.copy(os.getpid(), pairs, first)
    assert caught.value.errno == errno.ESTALE
    assert proofs.begin() not in (None, first)


def test_pages_that_the_kernel_does_not_copy_are_known(tmp_path: Path) -> None:
    path = tmp_path / "cut off"
    path.write_bytes(bytes(3 * mmap.PAGESIZE))
    with path.open("r+b") as f, mmap.mmap(f.fileno(), 0) as memory:
        pages = ctypes.c_char.from_buffer(memory)
        address = ctypes.addressof(pages)
        whole, first = (address, len(memory)), (address, mmap.PAGESIZE)
        assert host_memory.are_readable([first, whole] * 700)
        f.truncate(mmap.PAGESIZE)
        assert not host_memory.are_readable([*[first] * 700, whole])
        assert host_memory.are_readable([first])
        del pages
