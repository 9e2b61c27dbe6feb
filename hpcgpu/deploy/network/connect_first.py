"""Connect to the first of a scheduler's addresses that answers.

The attempts begin one after the other, in the order of preference, and overlap (RFC 8305, Happy Eyeballs).
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass

from distributed.comm import CommClosedError, connect
from distributed.comm.addressing import get_address_host, get_local_address_for
from distributed.comm.core import FatalCommClosedError
from distributed.security import Security

from hpcgpu.deploy.network import protocols
from hpcgpu.errors import LaunchError, TrustError

# connect() retries a refused port until its deadline: a dead address must not delay the next one.
_STAGGER_S = 0.25
# An address that refuses our certificate is most likely the scheduler's, unless another one answers soon: nodes have
# private addresses (of container bridges) that are the same everywhere.
_REFUSED_S = 1.0
# X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED of OpenSSL
_DATES = (9, 10)


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
            refused = any(f.refused for f in failures.values())
            limit_s = _REFUSED_S if refused else None
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
    waited_s = time.monotonic() - began
    kind = TrustError if any(f.other_cluster for f in failures.values()) else LaunchError
    raise kind(f"the scheduler could not be reached ({text}); tried for {waited_s:.1f} s")


async def _try(address: str, delay_s: float, deadline_s: float, arguments: dict[str, object]) -> Route | _Failure:
    await asyncio.sleep(delay_s)
    protocols.prepare(address)
    try:
        # connect() has no limit of its own for Dask's handshake, which comes after that of TLS
        async with asyncio.timeout(deadline_s):
            comm = await connect(address, timeout=deadline_s, **arguments)
    except FatalCommClosedError as e:
        return _refusal(e.__cause__ or e)
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


def _refusal(error: BaseException) -> _Failure:
    # Only our own check of a certificate is certain: a middlebox without TLS may stand between us and the scheduler.
    other_cluster = isinstance(error, ssl.SSLCertVerificationError)
    why = f"the certificates do not belong together: {error}"
    if isinstance(error, ssl.SSLCertVerificationError) and error.verify_code in _DATES:
        why = f"{error.verify_message}, by this host's clock ({time.strftime('%F %T %z')})"
    return _Failure(why, refused=True, other_cluster=other_cluster)
