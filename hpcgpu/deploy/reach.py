"""The first of a scheduler's addresses that answers, from where we are."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from distributed.comm import connect
from distributed.comm.addressing import get_address_host
from distributed.security import Security

from hpcgpu.errors import LaunchError

# connect() tries a refused port again until its time is up: a dead address must not delay the next one.
_STAGGER_S = 0.25


@dataclass(frozen=True, slots=True)
class Reached:
    """An address that answered, and the address of this host on the way to it."""

    address: str
    own_host: str


async def reach(addresses: Sequence[str], security: Security, deadline_s: float, role: str = "worker") -> Reached:
    """Return the first address that answers and takes our certificate.

    Parameters
    ----------
    addresses : sequence of str
        ``tls://10.0.0.1:45873``, in order of preference.
    security : Security
        Of this cluster.
    deadline_s : float
        How long to try, in seconds.
    role : str
        ``worker`` or ``client``.

    Raises
    ------
    LaunchError
        None answered; the message has each address with its reason. A Worker alone would try until its
        death timeout and not say why.

    """
    reasons: dict[str, str] = {}
    arguments = security.get_connection_args(role)
    tries = [
        asyncio.create_task(_try(a, i * _STAGGER_S, deadline_s, arguments, reasons)) for i, a in enumerate(addresses)
    ]
    try:
        for done in asyncio.as_completed(tries):
            if reached := await done:
                return reached
    finally:
        for task in tries:
            task.cancel()
    said = "; ".join(f"{address}: {why}" for address, why in reasons.items()) or "it has published none"
    raise LaunchError(f"the scheduler could not be reached within {deadline_s:g} s ({said})")


async def _try(
    address: str, delay_s: float, deadline_s: float, arguments: dict[str, object], reasons: dict[str, str]
) -> Reached | None:
    await asyncio.sleep(delay_s)
    try:
        comm = await connect(address, timeout=deadline_s, **arguments)
    except OSError as e:
        reasons[address] = str(e.__cause__ or e) or "no answer"
        return None
    own = get_address_host(comm.local_address)
    await comm.close()
    return Reached(address, own)
