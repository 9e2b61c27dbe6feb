"""The doctor's connections."""

from __future__ import annotations

import contextlib
import os

from hpcgpu.deploy.doctor.node import Listener, connect, connect_all

TOKEN, OTHER = "a" * 32, "b" * 32


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
