"""The doctor's looks at this machine, and its connections."""

import contextlib
import os
import threading
from pathlib import Path

import pytest

from hpcgpu.deploy.doctor import probes
from hpcgpu.deploy.doctor.node import Listener, connect, connect_all, gather_facts
from hpcgpu.host import host_memory, limits
from hpcgpu.model import CpuSet, NumaNode, Settings, Topology
from hpcgpu.plan.doctor.facts import Ucx

TOKEN, OTHER = "a" * 32, "b" * 32


def test_probe_that_hangs_or_fails_does_not_stop_others() -> None:
    hangs = threading.Event()

    def fails() -> None:
        raise OSError(5, "Input/output error")

    seen, why = probes.gather({"fine": lambda: 1, "hangs": hangs.wait, "fails": fails}, 0.2)
    hangs.set()
    assert seen == {"fine": 1}
    assert why == {"hangs": "no answer in 0.2 s", "fails": "[Errno 5] Input/output error"}


def test_a_folder_is_measured_and_left_empty(tmp_path: Path) -> None:
    found = probes.folder(tmp_path, 1 << 16)
    assert min(found.free_bytes, found.bytes_per_s, found.create_s) > 0
    assert abs(found.clock_s) < 1
    assert list(tmp_path.iterdir()) == []


def test_a_full_folder_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes.tempfile, "TemporaryDirectory", lambda **_: pytest.fail("written"))
    assert probes.folder(tmp_path, 1 << 60).bytes_per_s == 0
    _, why = probes.gather({"home": lambda: probes.folder(tmp_path / "none", 1)}, 5)
    assert "No such file" in why["home"]


def test_this_python_and_its_limits() -> None:
    found = probes.python()
    assert {"hpcgpu", "dask", "distributed"} <= set(found.packages)
    assert limits.read().files != 0
    assert probes.names().host == os.uname().nodename


def test_memory_of_a_node_is_without_that_of_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Grace Hopper; this machine's first node stands for a GPU's memory."""
    machine = Topology((), (), other_memory=(NumaNode(0, CpuSet(), 1, kind="gpu"),))
    monkeypatch.setattr(probes, "gather", lambda *_: ({"topology": machine}, {}))
    assert gather_facts(Settings()).memory_bytes == host_memory.memory_limit(CpuSet([0])).nbytes
    assert host_memory.memory_limit(CpuSet([0])).nbytes < host_memory.memory_limit().nbytes


def test_without_ucx_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/none")
    _, why = probes.gather({"ucx": probes.ucx}, 5)
    assert why == {"ucx": "there is no ucx_info here"}
    text = "# Library version: 1.21.0\n#\n#  Transport: tcp\n#  Transport: cma\n#  Transport: tcp\n"
    assert probes.read_ucx_info(text) == Ucx(version="1.21.0", transports=("cma", "tcp"))


@pytest.mark.parametrize(
    ("imports", "why"),
    [
        ("import json", ""),
        ("import nothing_of_this_name", "ModuleNotFoundError: No module named 'nothing_of_this_name'"),
        ("import os; os.kill(os.getpid(), 4)", "an import ended with signal 4: packages are built for another CPU"),
    ],
)
def test_packages_that_do_not_run_on_this_cpu_are_told(monkeypatch: pytest.MonkeyPatch, imports: str, why: str) -> None:
    monkeypatch.setattr(probes, "_IMPORTS", imports)
    broken, import_s = probes.imports()
    assert broken == why
    assert import_s > 0


def test_listener_sends_its_time_for_the_token_only() -> None:
    with contextlib.closing(Listener(TOKEN)) as listener:
        assert listener.endpoints, "this machine has no address but its loopback"
        endpoint = listener.endpoints[0]
        link = connect("node1", endpoint, TOKEN)
        assert (link.error, link.source, link.target) == ("", os.uname().nodename, "node1")
        assert (link.interface, link.address) == endpoint[:2]
        assert 0 < link.took_s < 3
        assert abs(link.clock_s) < 3
        assert connect("node1", endpoint, OTHER).error == "another program listens there"
        assert [k.error for k in connect_all("node1", listener.endpoints, TOKEN)] == [""] * len(listener.endpoints)
    assert connect("node1", endpoint, TOKEN).error == "Connection refused"


def test_imex_channel_of_any_number_is_enough(tmp_path: Path) -> None:
    assert not probes.imex_channel(tmp_path / "none")
    assert not probes.imex_channel(tmp_path)
    (tmp_path / "channel7").touch()
    assert probes.imex_channel(tmp_path)
