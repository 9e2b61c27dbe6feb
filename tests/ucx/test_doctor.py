"""The doctor's connections by UCX: a server and who knocks there, in processes of their own."""

from __future__ import annotations

import secrets

from hpcgpu.deploy.doctor import ucx_link
from hpcgpu.host import probes
from hpcgpu.host.knocking import Endpoint


def test_who_knows_the_token_gets_the_time() -> None:
    token = secrets.token_hex(16)
    with ucx_link.served(token) as port:
        endpoint = Endpoint("lo", "127.0.0.1", port, "ucx")
        (answer,) = ucx_link.knock_all([endpoint], token)
        assert answer.error == ""
        assert answer.took_s > 0
        (other,) = ucx_link.knock_all([endpoint], secrets.token_hex(16))
        assert other.error == "another program listens there"
    (gone,) = ucx_link.knock_all([endpoint], token)
    assert gone.error


def test_ucx_of_the_wheel_tells_its_transports() -> None:
    found = probes.ucx()
    assert found["version"]
    assert "tcp" in found["transports"]
