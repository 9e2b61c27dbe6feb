"""Where UCX cannot be: said before anything is started or submitted, with what to take in its place."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import fakesys
import pytest

from hpcgpu import LocalGPUCluster, PBSGPUCluster, SLURMGPUCluster
from hpcgpu.cli.commands import hpcgpu
from hpcgpu.deploy import network, settings
from hpcgpu.errors import ConfigError, LaunchError

UCX = {"protocol": "ucx"}
WHERE = "keyword {name}"


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "distributed_ucxx" else find(name))


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "is_ucx_installed", lambda: True)


def device(root: Path, interface: str, vendor: str, number: str) -> None:
    folder = root / "sys/class/net" / interface / "device"
    folder.mkdir(parents=True)
    (folder / "vendor").write_text(f"{vendor}\n")
    (folder / "device").write_text(f"{number}\n")


@pytest.mark.usefixtures("without")
@pytest.mark.parametrize("cluster", [LocalGPUCluster, SLURMGPUCluster, PBSGPUCluster])
def test_ucx_that_is_not_installed_is_said_by_the_classes(cluster: type) -> None:
    with pytest.raises(ConfigError, match=r"protocol='ucx' \(set by keyword protocol.* pip install 'hpcgpu\[ucx\]'"):
        cluster(**UCX)


@pytest.mark.usefixtures("without")
@pytest.mark.parametrize(
    "command", [["run"], ["launch", "--launcher", "mpirun"], ["plan", "--script", "--batch", "slurm"]]
)
def test_ucx_that_is_not_installed_is_said_by_the_commands(command: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"pip install 'hpcgpu\[ucx\]'; or leave protocol out, which gives tls"):
        hpcgpu.main([*command, "--protocol", "ucx", __file__], standalone_mode=False)


@pytest.mark.usefixtures("without")
def test_missing_ucx_is_an_error_at_a_cluster_with_ucx() -> None:
    network.prepare("tls://10.0.0.1:1")
    with pytest.raises(LaunchError, match=r"ucx://10.0.0.1:1 needs distributed-ucxx"):
        network.prepare("ucx://10.0.0.1:1")


@pytest.mark.usefixtures("installed")
def test_ucx_is_refused_on_slingshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in fakesys.environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    device(tmp_path, "eth0", "0x8086", "0x1572")
    assert settings.read(UCX, WHERE).settings.protocol == "ucx"
    device(tmp_path, "hsn1", "0x17db", "0x0501")
    device(tmp_path, "hsn0", "0x17db", "0x0501")
    with pytest.raises(ConfigError, match=r"Slingshot \(hsn0, hsn1\).*leave protocol out, which gives tls"):
        settings.read(UCX, WHERE)
    assert settings.read({"protocol": "tcp"}, WHERE).settings.protocol == "tcp"


@pytest.mark.usefixtures("installed")
def test_ucx_is_refused_on_a_site_whose_network_it_does_not_know() -> None:
    with pytest.raises(
        ConfigError, match=r"on perlmutter: UCX has no transport for this site's network \(NERSC docs, Dask, .*; leave"
    ):
        settings.read({**UCX, "site": "perlmutter"}, WHERE)
    assert settings.read({**UCX, "site": "vista"}, WHERE).settings.protocol == "ucx"


@pytest.mark.usefixtures("installed")
def test_ranks_that_speak_ucx_meet_by_files() -> None:
    """MPI would bring another UCX into the same process."""
    found = settings.read(UCX, WHERE).settings
    assert (found.rendezvous, found.where("rendezvous")) == ("file", "keyword protocol")
    with pytest.raises(ConfigError, match=r"rendezvous='mpi' .* with protocol='ucx'.*leave rendezvous out"):
        settings.read({**UCX, "rendezvous": "mpi"}, WHERE)
    assert settings.read({}, WHERE).settings.rendezvous == "mpi"
