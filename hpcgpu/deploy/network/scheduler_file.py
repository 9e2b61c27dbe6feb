"""The way to a scheduler: its file in the run's private folder, TLS for one cluster, the first address that answers.

Attempts to connect begin one after the other, in the order of preference, and overlap (RFC 8305, Happy Eyeballs).
"""

from __future__ import annotations

import asyncio
import datetime
import json
import os
import secrets
import ssl
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from distributed.comm import CommClosedError, connect
from distributed.comm.addressing import get_address_host, get_local_address_for
from distributed.comm.core import FatalCommClosedError
from distributed.core import rpc
from distributed.security import Security

from hpcgpu.deploy.network import protocol
from hpcgpu.errors import HpcGpuError, LaunchError, TrustError
from hpcgpu.host import private

_NAME = "hpcgpu cluster"
_VALIDITY = datetime.timedelta(days=3650)
# Clocks of nodes differ: a certificate that is valid from now on is refused by a node that is behind. One that takes
# its local time for UTC is behind by up to 12 hours.
_CLOCK_SKEW = datetime.timedelta(days=1)
_arguments: dict[tuple[str | None, ...], dict[str, Any]] = {}
_NOBODYS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
# connect() retries a refused port until its deadline: a dead address must not delay the next one.
_STAGGER_S = 0.25
# An address that refuses our certificate is most likely the scheduler's, unless another one answers soon: nodes have
# private addresses (of container bridges) that are the same everywhere.
_REFUSED_S = 1.0
# X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED of OpenSSL
_DATES = (9, 10)
_NONCE = "nonce"
_FILE = "scheduler"
_PROGRESS = "progress"
_LIFE = "life"
_ANSWER_S = 3.0


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
        """Make an EC P-256 certificate, valid for 10 years from a day before ``now`` (with a time zone)."""
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        key = ec.generate_private_key(ec.SECP256R1())  # 0.3 ms; RSA 2048 of Security.temporary() takes 79 ms
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, _NAME)])
        now = now or datetime.datetime.now(datetime.UTC)
        cert = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _CLOCK_SKEW)
            .not_valid_after(now + _VALIDITY)
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
    parts = {"cert": certificate.cert_pem, "key": certificate.key_pem}
    roles = {f"tls_{role}_{part}": pem for role in ("client", "scheduler", "worker") for part, pem in parts.items()}
    return ClusterSecurity(tls_ca_file=certificate.cert_pem, require_encryption=True, **roles)


class ClusterSecurity(Security):
    """distributed's Security with TLS contexts made once in a process, and with :class:`TlsSocket`.

    A context takes 3 ms; a leader would make two for each of its nannies. OpenSSL reads certificate and key from files.
    distributed's (2026.8.0) are in a temporary folder, which stays if the process is killed just then. These are in
    memory only, unless a user gave files.
    """

    def get_connection_args(self, role: str) -> dict[str, Any]:
        """Return the arguments of connect()."""
        return self._once(role, "connect", lambda: super(ClusterSecurity, self).get_connection_args(role))

    def get_listen_args(self, role: str) -> dict[str, Any]:
        """Return the arguments of listen()."""
        return self._once(role, "listen", lambda: super(ClusterSecurity, self).get_listen_args(role))

    def _get_tls_context(self, tls: dict[str, Any], purpose: ssl.Purpose) -> Any:  # distributed's
        with _in_memory(tls["cert"]) as cert, _in_memory(tls["key"]) as key:
            return super()._get_tls_context({**tls, "cert": cert, "key": key}, purpose)

    def _once(self, role: str, way: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        key = (*self.get_tls_config_for_role(role).values(), way)
        if key not in _arguments:
            try:
                made = make()
                if context := made["ssl_context"]:  # None without a certificate
                    context.sslsocket_class = TlsSocket
                if context and way == "listen":  # two tickets take a third of a handshake's CPU time; nobody has one
                    context.num_tickets = 0
                _arguments[key] = made
            except (OSError, ValueError) as e:  # OpenSSL's too; its words hold nothing of the key
                raise TrustError(f"the certificate of this cluster, or its key, cannot be used: {e}") from e
        return dict(_arguments[key])


@contextmanager
def _in_memory(text: str | None) -> Iterator[str | None]:
    """Yield the path of a file with this text that is in no folder; a path, or None, as it is."""
    if text is None or "\n" not in text:
        yield text
        return
    with os.fdopen(os.memfd_create("hpcgpu-tls"), "w") as f:
        f.write(text)
        f.flush()
        yield f"/proc/self/fd/{f.fileno()}"


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


@dataclass(frozen=True, slots=True)
class Route:
    """An address that answered, and this host's address on the way to it, in distributed's format: ``[::1]``."""

    address: str
    own_host: str


@dataclass(frozen=True, slots=True)
class _Failure:
    why: str
    refused: bool = False
    other_cluster: bool = False


async def connect_first(addresses: Sequence[str], security: Security, deadline_s: float, role: str = "worker") -> Route:
    """Return the first address (``tls://10.0.0.1:45873``) that answers and accepts the certificate; or LaunchError.

    The addresses are in order of preference; ``role`` is ``worker`` or ``client``. The error has each address with its
    reason. If an address refuses the certificate it comes soon: a Worker alone would try until its death timeout
    without a reason. It is a TrustError if the address has a certificate of another cluster.
    """
    began = time.monotonic()
    arguments = security.get_connection_args(role)
    pending = {
        asyncio.create_task(_try(address, i * _STAGGER_S, deadline_s, arguments), name=address)
        for i, address in enumerate(addresses)
    }
    failures: dict[str, _Failure] = {}
    try:
        while pending:
            limit_s = _REFUSED_S if any(f.refused for f in failures.values()) else None
            done, pending = await asyncio.wait(pending, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                answer = task.result()
                if isinstance(answer, Route):
                    return answer
                failures[task.get_name()] = answer
            if not done:
                break
    finally:
        for task in pending:
            task.cancel()
    reasons = [f"{a}: {failures[a].why if a in failures else 'no answer'}" for a in addresses]
    text = "; ".join(reasons) or "it has published no address"
    kind = TrustError if any(f.other_cluster for f in failures.values()) else LaunchError
    raise kind(f"the scheduler could not be reached ({text}); tried for {time.monotonic() - began:.1f} s")


async def _try(address: str, delay_s: float, deadline_s: float, arguments: dict[str, object]) -> Route | _Failure:
    await asyncio.sleep(delay_s)
    protocol.prepare(address)
    try:
        # connect() has no limit of its own for Dask's handshake, which comes after that of TLS
        async with asyncio.timeout(deadline_s):
            comm = await connect(address, timeout=deadline_s, **arguments)
    except FatalCommClosedError as e:
        # Only our own check of a certificate is certain: a middlebox without TLS may stand between us and it.
        if not isinstance(error := e.__cause__, ssl.SSLCertVerificationError):
            return _Failure(f"the certificates do not belong together: {error or e}", refused=True)
        why = f"the certificates do not belong together: {error}"
        if error.verify_code in _DATES:
            why = f"{error.verify_message}, by this host's clock ({time.strftime('%F %T %z')})"
        return _Failure(why, refused=True, other_cluster=True)
    except CommClosedError as e:
        # TLS 1.3: the peer checks our certificate when the handshake is over for us. A reset may lose its alert.
        return _Failure(f"it closed the connection, as it does to a certificate that it does not know: {e}", True)
    except OSError as e:
        return _Failure(str(e.__cause__ or e) or f"no answer within {deadline_s:g} s")
    if comm.local_address:
        host = get_address_host(comm.local_address)
    else:  # UCX's connections do not know it (distributed-ucxx 0.52)
        host = str(get_local_address_for(address)).partition("://")[2].strip("[]")
    await comm.close()
    return Route(address, f"[{host}]" if ":" in host else host)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerFile:
    """The file's content. Rank 0 writes it when the workers are there, without workers when the scheduler is."""

    addresses: tuple[str, ...]
    node: str
    job_id: str = ""
    restart_count: int = 0  # the number of the job's life: a requeued job keeps its id
    cert: str = ""
    key: str = field(default="", repr=False)
    # written to the folder by the submitting object: another run's file has another one
    nonce: str = field(default="", repr=False)
    dashboard_port: int = 0
    dashboard_secret: str = field(default="", repr=False)
    files: int = -1  # how many the scheduler may open: its hard limit; -1: unlimited, or unknown

    @property
    def certificate(self) -> Certificate | None:
        """The cluster's certificate; None without TLS."""
        return Certificate(self.cert, self.key) if self.cert else None


def make_folder(home: Path) -> Path:
    """Make a new run's folder below ``home``, with a nonce; raise HpcGpuError if it is not writable or not private."""
    try:
        private.make_folder(home)
        folder = private.make_folder(home / secrets.token_hex(8))
        try:
            private.write(folder / _NONCE, secrets.token_urlsafe())
        except OSError:
            folder.rmdir()
            raise
    except OSError as e:
        raise HpcGpuError(
            f"a cluster's files cannot be written to {home}: {e.strerror}. They need a home folder (HOME) that can be "
            "written, has room, and is there on the nodes, too"
        ) from e
    return folder


def publish(folder: Path, content: SchedulerFile) -> None:
    """Write the file with the folder's nonce, and a higher ``restart_count`` than before; called by rank 0."""
    life = folder / _LIFE  # no variable shows that PBS reruns a job
    count = max(content.restart_count, int(life.read_text()) + 1 if private.mode_of(life) else 0)
    private.write(life, str(count))
    facts = asdict(content) | {"nonce": private.read(folder / _NONCE), "restart_count": count}
    private.write(folder / _FILE, json.dumps(facts))


def retract(folder: Path, *, forever: bool) -> None:
    """Remove secrets at the end of the job, the nonce only if the client is gone ``forever``: a requeue needs it."""
    for name in (_FILE, _NONCE) if forever else (_FILE,):
        (folder / name).unlink(missing_ok=True)


def report_progress(folder: Path, workers: int) -> None:
    """Write how many workers have registered, for a client that waits for the file; called by rank 0."""
    private.write(folder / _PROGRESS, str(workers))


def read_progress(folder: Path) -> int:
    """Return how many workers have registered; 0 before rank 0 has written it."""
    try:
        return int((folder / _PROGRESS).read_text())
    except FileNotFoundError:
        return 0


def read(folder: Path) -> SchedulerFile | None:
    """Return the file's content; None if there is no file yet.

    Raises OSError if the folder is gone, HpcGpuError if others may change the file, TrustError if another run or
    another version of hpcgpu has written it (with the path to the wrong value).
    """
    if _FILE not in {p.name for p in folder.iterdir()}:  # NFS's cache may answer for a single name
        return None
    import msgspec  # 10 to 30 ms, which the scheduler need not pay: it only writes the file

    wrong = f"{folder / _FILE} is damaged, or of another version of hpcgpu"
    try:
        facts = json.loads(private.read(folder / _FILE))
        content = msgspec.convert(facts, SchedulerFile)
    except (ValueError, msgspec.MsgspecError) as e:  # a ValueError from msgspec 0.22 on
        raise TrustError(f"{wrong}: {e}") from e
    if more := facts.keys() - {field.name for field in fields(SchedulerFile)}:
        raise TrustError(f"{wrong}: holds more than this hpcgpu reads - at `$.{min(more)}`")
    if content.nonce != private.read(folder / _NONCE):
        raise TrustError(f"{folder / _FILE} was not written by the scheduler of this run: its nonce is another one")
    return content


async def say_goodbye(folder: Path) -> bool:
    """Have the scheduler end its run; return False if it cannot be reached from here."""
    return await call(folder, lambda scheduler: scheduler.hpcgpu_lease(goodbye=True)) is not None


async def workers_and_use(folder: Path) -> tuple[tuple[str, ...], dict[str, Any]] | None:
    """Return the names of the registered workers, and the facts of the run's summary; None if it is out of reach."""

    async def ask(scheduler: Any) -> tuple[tuple[str, ...], dict[str, Any]]:  # distributed's rpc
        facts = await scheduler.identity()
        return tuple(str(worker["name"]) for worker in facts["workers"].values()), await scheduler.hpcgpu_summary()

    answer: tuple[tuple[str, ...], dict[str, Any]] | None = await call(folder, ask)
    return answer


async def call(folder: Path, question: Callable[[Any], Awaitable[Any]]) -> Any:
    """Return the scheduler's answer; None without a scheduler or an answer."""
    content = await asyncio.to_thread(read, folder)
    if content is None:
        return None
    trust = security(content.certificate)
    try:
        address = (await connect_first(content.addresses, trust, _ANSWER_S, "client")).address
        async with rpc(address, connection_args=trust.get_connection_args("client")) as scheduler:
            return await asyncio.wait_for(question(scheduler), _ANSWER_S)
    except (OSError, TimeoutError, LaunchError):
        return None
