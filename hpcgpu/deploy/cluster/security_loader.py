"""distributed's ``distributed.client.security-loader``: whoever has the address of the user's own cluster may connect.

Processes that have imported a cluster class have it. Any other one gets it by the variable
``DASK_DISTRIBUTED__CLIENT__SECURITY_LOADER=hpcgpu.deploy.cluster.security_loader.load``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from weakref import WeakValueDictionary

import dask
from distributed.security import Security

from hpcgpu.deploy.cluster.local_run import folders
from hpcgpu.deploy.jobs import home
from hpcgpu.deploy.network import scheduler_file
from hpcgpu.errors import ConfigError, HpcGpuError, LaunchError
from hpcgpu.host import log

_NAME = "distributed.client.security-loader"
# of this process's clusters, by address: that of a tunnel stands in no scheduler file
_connected: WeakValueDictionary[str, Security] = WeakValueDictionary()


def install() -> None:
    """Be the security loader of this process, unless the user has another one."""
    if not dask.config.get(_NAME, None):
        dask.config.set({_NAME: f"{__name__}.{load.__name__}"})


def remember(address: str, security: Security) -> None:
    """Know a cluster of this process, as long as something holds its ``security``."""
    if security.require_encryption:
        _connected[address] = security


def load(info: Mapping[str, str]) -> Security | None:
    """Return the Security of the cluster at ``info["address"]``; None for those of others; ConfigError for none at all.

    A local cluster with its own ``local_directory`` is found by its own process only. ``Client(...)`` calls it, also on
    an event loop, which would wait for a thread, too: 0.4 ms for each run of the user.
    """
    address = info["address"]
    if (security := _connected.get(address)) or not address.startswith("tls://"):
        return security
    # Local clusters have their folders among temporary files. Reading refuses what another user could have put there.
    of_runs = [*folders()]
    try:
        of_runs += home().glob("*/")
    except LaunchError as error:  # another TLS scheduler's certificate may be in Dask's configuration
        log.say(f"the certificate of {address} is not among those of your runs: {error}")
    for folder in of_runs:
        try:
            if folder.stat().st_uid != os.getuid():
                continue
            content = scheduler_file.read(folder)
        except (OSError, HpcGpuError):  # another cluster's, made or removed just now, or of another version
            continue
        if content and address in content.addresses:
            return scheduler_file.security(content.certificate)
    if dask.config.get("distributed.comm.tls.ca-file", None):
        return None
    raise ConfigError(
        f"{address}: none of your clusters here has this address. Attach to a local one with its own local_directory "
        "by that folder, LocalGPUCluster.attach('that/folder'), to one elsewhere by its name; or give security="
    )
