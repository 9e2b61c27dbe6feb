"""Settings that contradict each other, or do not fit the site's nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcgpu.errors import ConfigError, opt
from hpcgpu.model.allocation import parse_simulated
from hpcgpu.model.settings import Settings

if TYPE_CHECKING:
    from hpcgpu.model.site import Site

LIBRARIES = ("cupy", "torch")  # RMM has an allocator for these and for numba (rmm.allocators, 26.10)


def check_settings(settings: Settings, site: Site | None = None) -> None:
    """Raise ConfigError, with values and sources, if settings contradict each other or do not fit the site's nodes."""
    if len(argv := (settings.python or "").split()) > 1 and "/" not in argv[0]:
        raise ConfigError(
            f"{settings.opt('python')}: one program is allowed, without options; {opt('launcher')} starts it"
        )
    _check_network(settings, site)
    _check_gpus(settings, site)
    _check_rapids(settings)


def _check_network(settings: Settings, site: Site | None) -> None:
    tls = opt("protocol", "tls")
    both = f"{settings.opt('protocol')} with {settings.opt('security')}"
    if settings.protocol == "ucx" and settings.security:
        raise ConfigError(f"{both}: UCX cannot encrypt; leave security out and accept it, or use {tls}")
    if settings.protocol == "tls" and settings.security is False:
        raise ConfigError(f"{both}: leave one of the two out; without TLS it is {opt('protocol', 'tcp')}")
    if settings.protocol == "tcp" and settings.security:
        raise ConfigError(f"{both}: tcp is not encrypted; leave protocol out, or use {tls}")
    if settings.protocol == "ucx" and "rendezvous" in settings.sources and settings.rendezvous == "mpi":
        raise ConfigError(
            f"{settings.opt('rendezvous')} with {settings.opt('protocol')}: MPI brings a UCX of its own into the "
            "process, with which the other does not work; leave rendezvous out: the ranks meet by files then"
        )
    if settings.protocol == "ucx" and site is not None and site.network.ucx is False:
        cited = site.cited(site.network, "ucx")
        raise ConfigError(
            f"{settings.opt('protocol')} on {site.name}: UCX has no transport for this site's network "
            f"({cited}); leave protocol out, which gives tls on the nearest interface"
        )


def _check_gpus(settings: Settings, site: Site | None) -> None:
    per_node = settings.gpus_per_node
    if per_node is None:
        return
    if per_node == 0 and not settings.cpu_workers:
        raise ConfigError(
            f"{settings.opt('gpus_per_node')} leaves no worker: give {opt('cpu_workers', 4)} too, or a GPU at least"
        )
    if settings.gpus is not None:
        if (count := parse_simulated(settings.gpus).per_node) != per_node:
            raise ConfigError(
                f"{settings.opt('gpus_per_node')}, but {settings.opt('gpus')} simulates {count} on each node; "
                f"leave {opt('gpus_per_node', None)} out"
            )
    elif site is not None and (node := site.node(settings.queue)) and per_node > node.gpus and settings.site_limits:
        cited = site.cited(node, "gpus")
        raise ConfigError(
            f"{settings.opt('gpus_per_node')}, but a node of {site.name} has {node.gpus} ({cited}); allowed: 1 to "
            f"{node.gpus}; more GPUs by {opt('nodes')}"
        )


def _check_rapids(settings: Settings) -> None:
    cite = settings.opt
    if settings.rmm_async and settings.rmm_managed_memory:
        raise ConfigError(
            f"{cite('rmm_async')} with {cite('rmm_managed_memory')}: CUDA's asynchronous allocator gives no managed "
            "memory; leave one of the two out"
        )
    if settings.rmm_release_threshold and not settings.rmm_async:
        threshold, needed = cite("rmm_release_threshold"), opt("rmm_async", True)
        raise ConfigError(f"{threshold} is for {needed} only; give it too, or leave it out")
    if settings.rmm_maximum_pool_size and not (settings.rmm_pool_size or settings.rmm_async):
        raise ConfigError(
            f"{cite('rmm_maximum_pool_size')} without a pool; give {opt('rmm_pool_size')} or {opt('rmm_async', True)} "
            "too, or leave it out"
        )
    pool, most = settings.rmm_pool_size, settings.rmm_maximum_pool_size
    # A fraction and bytes are compared later, when the GPU's size is known.
    if pool and most and pool.is_part == most.is_part and float(most.value) < float(pool.value):
        raise ConfigError(
            f"{cite('rmm_maximum_pool_size')} is less than {cite('rmm_pool_size')}; allowed: as much, or more"
        )
    if unknown := [name for name in settings.rmm_libraries if name not in LIBRARIES]:
        raise ConfigError(
            f"{cite('rmm_allocator_external_lib_list')}: RMM has no allocator for {unknown[0]!r}; "
            f"allowed: {', '.join(LIBRARIES)}"
        )
    if settings.cudf_spill_stats and not settings.enable_cudf_spill:
        spill = opt("enable_cudf_spill", True)
        raise ConfigError(f"{cite('cudf_spill_stats')} without {spill}; give both, or neither")
