"""A scheduler of this process, to come to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from distributed import Scheduler

from hpcgpu.deploy.network.tls import Certificate, security


def knock(scheduler: Certificate, how: Callable[[str], Any]) -> Any:
    """Start a scheduler with a certificate, and come to it."""

    async def main() -> Any:
        trust = security(scheduler)
        async with Scheduler(host="127.0.0.1", port=0, protocol="tls", security=trust, dashboard=False) as there:
            return await how(there.address)

    return asyncio.run(main())
