"""Certificates: how long they are good, and what is said at once of one that is not."""

from __future__ import annotations

import datetime
import re
import tempfile
from typing import Any

import pytest
from comms import knock
from distributed import Client
from distributed.comm.core import FatalCommClosedError

from hpcgpu.deploy.network.scheduler_file import Certificate, connect_first, security
from hpcgpu.errors import TrustError

DAY = datetime.timedelta(days=1)
# Nobody waits for it: what is tested is said at once, or the test never ends.
NEVER_S = 3600


def made(ago: datetime.timedelta) -> Certificate:
    return Certificate.make(datetime.datetime.now(datetime.UTC) - ago)


def knock_as_we_do(scheduler: Certificate, comes_with: Certificate) -> Any:
    return knock(scheduler, lambda address: connect_first([address], security(comes_with), NEVER_S, "client"))


@pytest.mark.parametrize("age", [0 * DAY, 3640 * DAY, -DAY / 2], ids=["new", "of ten years ago", "of a clock ahead"])
def test_it_is_good_for_longer_than_any_cluster_lives(age: datetime.timedelta) -> None:
    """A job that joins a cluster of weeks has nothing to renew; a clock may be half a day wrong."""
    certificate = made(age)
    assert knock_as_we_do(certificate, certificate).own_host == "127.0.0.1"


@pytest.mark.parametrize(
    ("age", "message"),
    [
        (3660 * DAY, "certificate has expired, by this host's clock ({clock}"),
        (-2 * DAY, "certificate is not yet valid, by this host's clock ({clock}"),
        (None, "the certificates do not belong together"),
    ],
)
def test_wrong_certificate_is_reported_at_once(age: datetime.timedelta | None, message: str) -> None:
    """With a wrong date, or that of another cluster."""
    certificate = made(0 * DAY if age is None else age)
    clock = datetime.datetime.now().astimezone().strftime("%F %H:")
    with pytest.raises(TrustError, match=re.escape(message.format(clock=clock))):
        knock_as_we_do(certificate, Certificate.make() if age is None else certificate)


@pytest.mark.parametrize("age", [0 * DAY, 3660 * DAY], ids=["another cluster's", "expired"])
def test_dasks_own_client_hears_it_at_once(age: datetime.timedelta) -> None:
    ours = made(age)
    theirs = ours if age else Certificate.make()

    async def connect(address: str) -> None:
        async with Client(address, security=security(theirs), asynchronous=True, timeout=NEVER_S):
            pass

    with pytest.raises(FatalCommClosedError, match="TLS certificate does not match") as caught:
        knock(ours, connect)
    assert ("has expired" in str(caught.value.__cause__)) == bool(age)


ONE, OTHER = Certificate.make(), Certificate.make()


@pytest.mark.parametrize(
    "certificate",
    [
        Certificate(ONE.cert_pem, OTHER.key_pem),
        Certificate(ONE.cert_pem, ONE.key_pem[:100]),
        Certificate(ONE.cert_pem[:100] + "\n", ONE.key_pem),
        Certificate("no certificate", "no key"),
    ],
    ids=["the key of another", "half a key", "half a certificate", "neither"],
)
def test_one_that_was_damaged_is_an_error_without_the_key(certificate: Certificate) -> None:
    with pytest.raises(TrustError, match="the certificate of this cluster, or its key, cannot be used: ") as caught:
        security(certificate).get_connection_args("client")
    assert not [line for line in certificate.key_pem.splitlines() if line in repr(caught.value)]


def test_a_process_makes_its_tls_contexts_once() -> None:
    """A leader has a nanny for each GPU; a context takes 3 ms."""
    first, second = security(ONE), security(Certificate(ONE.cert_pem, ONE.key_pem))
    assert first.get_connection_args("client") == second.get_connection_args("worker")
    assert first.get_listen_args("scheduler") == second.get_listen_args("worker")
    assert first.get_listen_args("worker") != security(OTHER).get_listen_args("worker")


def test_the_key_lies_in_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is killed while OpenSSL reads it leaves nothing behind."""
    monkeypatch.setattr(tempfile, "tempdir", "/nonexistent")
    made = security(Certificate.make())
    assert made.get_listen_args("scheduler")["ssl_context"].cert_store_stats()["x509_ca"] == 1
    assert made.get_connection_args("client")["ssl_context"].cert_store_stats()["x509_ca"] == 1
