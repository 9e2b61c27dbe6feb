"""The doctor's connections, by TCP and TLS."""

from __future__ import annotations

import contextlib
import datetime
from pathlib import Path

import pytest

from hpcgpu.deploy.network.tls import Certificate
from hpcgpu.host.knocking import Endpoint, Listener, knock, probe_often

TOKEN, OTHER = "a" * 32, "b" * 32
NOW = datetime.datetime.now(datetime.UTC)


def certificate(folder: Path, name: str, now: datetime.datetime = NOW) -> Path:
    made, path = Certificate.make(now), folder / name
    path.write_text(made.cert_pem + made.key_pem)
    return path


def place(listener: Listener, protocol: str) -> Endpoint:
    assert listener.where, "this machine has no address but its loopback"
    return next(there for there in listener.where if there.protocol == protocol)


@pytest.mark.parametrize("protocol", ["tcp", "tls"])
def test_who_knows_the_token_gets_the_time(tmp_path: Path, protocol: str) -> None:
    known = certificate(tmp_path, "known")
    with contextlib.closing(Listener(TOKEN, known)) as listener:
        there = place(listener, protocol)
        answer = probe_often(there, TOKEN, known)
        assert answer.error == ""
        assert 0 < answer.took_s < 3
        assert abs(answer.clock_s) < 3
        assert knock(there, OTHER, known).error == "another program listens there"
    assert knock(there, TOKEN, known).error == "Connection refused"


def test_tls_asks_both_for_the_certificate_and_its_days(tmp_path: Path) -> None:
    known, other = certificate(tmp_path, "known"), certificate(tmp_path, "other")
    with contextlib.closing(Listener(TOKEN, known)) as listener:
        assert "CERTIFICATE_VERIFY_FAILED" in knock(place(listener, "tls"), TOKEN, other).error
    soon = certificate(tmp_path, "soon", NOW + datetime.timedelta(days=3))
    with contextlib.closing(Listener(TOKEN, soon)) as listener:
        assert "not yet valid" in knock(place(listener, "tls"), TOKEN, soon).error


def test_without_a_certificate_there_is_tcp_alone() -> None:
    with contextlib.closing(Listener(TOKEN)) as listener:
        assert {there.protocol for there in listener.where} == {"tcp"}
