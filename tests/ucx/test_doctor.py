"""The doctor's look at UCX."""

from __future__ import annotations

from hpcgpu.deploy.doctor import probes


def test_ucx_of_the_wheel_tells_its_transports() -> None:
    ucx = probes.ucx()
    assert ucx.version
    assert "tcp" in ucx.transports
