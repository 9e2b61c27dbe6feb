"""Rank 0's scheduler: forked before the meeting, presented to the others in it."""

from __future__ import annotations

import os
from typing import Any

from hpcgpu.agent.image import Image
from hpcgpu.errors import LaunchError
from hpcgpu.host import log
from hpcgpu.host.addresses import loopback, own_addresses
from hpcgpu.model import RunDocument, Settings

_IPV4 = "0.0.0.0"  # noqa: S104 - UCX's listener wants an address


class Scheduling:
    """The scheduler process and what the other ranks must know of it.

    Parameters
    ----------
    run : RunDocument
        What the run is.
    image : Image
        Forks the process.
    local : bool
        True when all ranks are on this node and nobody is outside: then it listens on loopback only.

    """

    def __init__(self, run: RunDocument, image: Image, *, local: bool) -> None:
        from hpcgpu.deploy.network.protocols import is_ucx_installed, ucx_missing
        from hpcgpu.deploy.network.tls import Certificate, secret
        from hpcgpu.deploy.processes.scheduler import SchedulerSpec

        settings = run.settings
        self._local, self._interface, self._loopback = local, settings.interface, loopback()
        self.protocol = protocol(settings)
        if self.protocol == "ucx" and not is_ucx_installed():
            raise LaunchError(f"protocol='ucx' {ucx_missing()}")
        self.certificate = Certificate.make() if self.protocol == "tls" else None
        self.secret = secret() if settings.dashboard else ""
        if self.certificate is None:
            log.say(f"protocol {self.protocol} is not encrypted: who reaches the scheduler's port runs code as you")
        spec = SchedulerSpec(
            local_directory=str(image.scratch.path),
            host=self._loopback if local else (_IPV4 if self.protocol == "ucx" else ""),  # TLS both ways guards it
            protocol=self.protocol,
            certificate=self.certificate,
            dashboard_secret=self.secret,
            client_grace_s=settings.client_grace_s,
            stalled_s=settings.death_timeout_s,
            grows=run.shape == "head" or (run.shape == "gang" and settings.shape == "elastic"),
            rank_pid=os.getpid(),
        )
        self.child = image.start_scheduler(spec)
        self.dashboard_port = 0

    def record(self) -> dict[str, Any]:
        """Wait until the scheduler listens; return its addresses and certificate."""
        started = self.child.wait_started()
        self.dashboard_port = started["dashboard_port"]
        hosts = (self._loopback,) if self._local else own_addresses(started["hosts"], self._interface)
        return {
            "addresses": [f"{self.protocol}://{_bracketed(h)}:{started['port']}" for h in hosts],
            "protocol": self.protocol,
            "local": self._local,
            "cert": self.certificate.cert_pem if self.certificate else "",
            "key": self.certificate.key_pem if self.certificate else "",
        }


def protocol(settings: Settings) -> str:
    """Return Dask's protocol: tls, unless the user turned encryption off."""
    return settings.protocol or ("tcp" if settings.security is False else "tls")


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
