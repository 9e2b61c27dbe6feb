"""TLS for one cluster: a certificate made for it, distributed's Security that uses it, and sockets for it."""

from __future__ import annotations

import datetime
import os
import secrets
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from distributed.security import Security

from hpcgpu.errors import TrustError

_NAME = "hpcgpu cluster"
_LIFE = datetime.timedelta(days=3650)
# Clocks of nodes differ: a certificate that is valid from now on is refused by a node that is behind. One that takes
# its local time for UTC is behind by up to 12 hours.
_CLOCK_SKEW = datetime.timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Certificate:
    """One self-signed certificate for all processes of a cluster: a process that holds the key is a member.

    It ends with the scheduler that it was made for; each life of a requeued job has another one. Its dates only have to
    outlast every cluster: nothing is renewed while processes run. Workers run the user's code and hold the key.
    Short-lived certificates, one for each process, would need a signing key beside them, with which a thief makes new
    ones. ``repr`` never shows the key.
    """

    cert_pem: str
    key_pem: str = field(repr=False)

    @classmethod
    def make(cls, now: datetime.datetime | None = None) -> Certificate:
        """Make an EC P-256 certificate: 0.3 ms, where Security.temporary() takes 79 ms for RSA 2048."""
        # It is valid from a day before now, which has a time zone, for 10 years.
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, _NAME)])
        now = now or datetime.datetime.now(datetime.UTC)
        cert = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _CLOCK_SKEW)
            .not_valid_after(now + _LIFE)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(key, hashes.SHA256())
        )
        pem = serialization.Encoding.PEM
        key_bytes = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        return cls(cert.public_bytes(pem).decode(), key_bytes.decode())


def security(certificate: Certificate | None) -> Security:
    """Return distributed's Security: TLS both ways, encryption required; no TLS without a certificate."""
    if certificate is None:
        return Security()
    roles = {f"tls_{role}_{part}": getattr(certificate, f"{part}_pem") for role in _ROLES for part in ("cert", "key")}
    return ClusterSecurity(tls_ca_file=certificate.cert_pem, require_encryption=True, **roles)


class ClusterSecurity(Security):
    """distributed's Security with TLS contexts made once in a process, and with :class:`TlsSocket`.

    A context takes 3 ms; a leader would make two for each of its nannies. OpenSSL reads certificate and key from files.
    distributed's (2026.8.0) are in a temporary folder, which stays if the process is killed just then. These are in
    memory only.
    """

    def get_connection_args(self, role: str) -> dict[str, Any]:
        """Return the arguments of connect(); all roles have the same certificate."""
        return self._once("connect", lambda: super(ClusterSecurity, self).get_connection_args(role))

    def get_listen_args(self, role: str) -> dict[str, Any]:
        """Return the arguments of listen()."""
        return self._once("listen", lambda: super(ClusterSecurity, self).get_listen_args(role))

    def _get_tls_context(self, tls: dict[str, Any], purpose: ssl.Purpose) -> Any:  # distributed's
        with _in_memory(tls["cert"]) as cert, _in_memory(tls["key"]) as key:
            return super()._get_tls_context({**tls, "cert": cert, "key": key}, purpose)

    def _once(self, way: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        key = (self.tls_worker_cert, self.tls_worker_key, way)
        if key not in _arguments:
            try:
                _arguments[key] = make()
                _arguments[key]["ssl_context"].sslsocket_class = TlsSocket
            except (OSError, ValueError) as e:  # OpenSSL's too; its words hold nothing of the key
                raise TrustError(f"the certificate of this cluster, or its key, cannot be used: {e}") from e
        return dict(_arguments[key])


@contextmanager
def _in_memory(text: str) -> Iterator[str]:
    """Yield the path of a file with this text that is in no folder."""
    with os.fdopen(os.memfd_create("hpcgpu-tls"), "w") as f:
        f.write(text)
        f.flush()
        yield f"/proc/self/fd/{f.fileno()}"


_arguments: dict[tuple[str, str, str], dict[str, Any]] = {}
_ROLES = ("client", "scheduler", "worker")


def secret() -> str:
    """Return a random token, fit for a URL."""
    return secrets.token_urlsafe(24)


class TlsSocket(ssl.SSLSocket):
    """An SSLSocket that leaves no error behind, for ``SSLContext.sslsocket_class``: a broken one breaks no other.

    OpenSSL keeps a queue of errors for each thread. The next read or write takes an error that is still there for its
    own. From OpenSSL 3.4 on a peer that has gone leaves one (a last alert that cannot be sent). CPython 3.12 to 3.14
    raises it as BrokenPipeError and does not remove it (github.com/python/cpython, issues 127257 and 148594). The next
    connection of the event loop that has nothing to read is then closed, too. With Python 3.13.5 and OpenSSL 3.5 three
    workers of four were lost so when they registered.
    """

    def do_handshake(self, block: bool = False) -> None:
        """Perform the handshake; tickets that could not be sent after it are no error, but leave one."""
        super().do_handshake(block)
        forget_errors()

    def read(self, len: int = 1024, buffer: Any = None) -> Any:  # as there
        """Read; ``recv`` and ``recv_into`` call this."""
        try:
            got = super().read(len, buffer)
        except ssl.SSLError:
            raise  # CPython forgets after its own
        except OSError:
            forget_errors()
            raise
        if not got:
            forget_errors()  # the peer has gone, and may have been sent an alert
        return got

    def send(self, data: Any, flags: int = 0) -> int:  # as there
        """Write."""
        try:
            return super().send(data, flags)
        except ssl.SSLError:
            raise
        except OSError:
            forget_errors()
            raise


def forget_errors() -> None:
    """Empty this thread's queue of OpenSSL errors: ``set_ciphers`` does when it fails (_ssl.c), and nothing else."""
    with suppress(ssl.SSLError):
        _NOBODYS.set_ciphers("no cipher of this name")


_NOBODYS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
