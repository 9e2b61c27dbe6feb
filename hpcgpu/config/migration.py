"""Option names of dask-jobqueue, dask-cuda and distributed that mean something else here, or nothing yet.

Names with the same meaning are aliases of ours, in :class:`hpcgpu.model.Settings`. Everything else stands in
this table, so that whoever switches is told what to write instead, and nothing is dropped silently.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from hpcgpu.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Foreign:
    """What to write instead of a foreign option, and the values that ask for what happens here anyway."""

    instead: str
    harmless: tuple[object, ...] = ()

    def is_harmless(self, value: object) -> bool:
        """Return whether the value, or its text from the environment, can be passed over."""
        # By text, since True == 1 and processes=1 is not processes=True.
        return str(value).lower() in {str(h).lower() for h in self.harmless}


UCX = "UCX chooses its transports itself; leave it out, or give env={'UCX_TLS': '...'}"
WATCHED = "each worker is watched by hpcgpu's own nanny; leave it out"
SCHEDULER = "the scheduler runs on MPI rank 0 with its own options: dashboard, interface, protocol, security"
PORTS = "ports are free ones, found at start; interface says on which network"
ADDRESS = "addresses are found at start; interface says on which network"
DASHBOARD = "the dashboard is on loopback, on a free port behind a secret: dashboard=True or False"
LIFETIME = "walltime says how long the job lives, and drain how long before its end workers hand their data to others"
PRELOAD = "workers load nothing at start; Client.register_plugin, once the cluster is there, does it in all of them"
ARGUMENTS = "a worker's options are options of the cluster: nthreads, memory_limit, resources, local_directory, env"

# dask-jobqueue 0.9 (facts/jobqueue.md 1.1, 1.2): a job of ours has many nodes and one worker per GPU.
JOBQUEUE: Mapping[str, Foreign] = MappingProxyType(
    {
        "processes": Foreign("there is one worker per GPU: give gpus_per_node", (True,)),
        "n_workers": Foreign("there is one worker per GPU: give nodes and gpus_per_node"),
        "job_cpu": Foreign("give cores_per_gpu, the cores asked for each GPU"),
        "job_mem": Foreign("give memory, the memory asked for on each node"),
        "ncpus": Foreign("give cores_per_gpu, the cores asked for each GPU"),
        "mem": Foreign("give memory, the memory asked for on each node"),
        "resource_spec": Foreign(
            "it is written from nodes, gpus_per_node, cores_per_gpu and memory; what a site adds to each chunk "
            "stands in its site file (dialect.resources)"
        ),
        "job_extra": Foreign("give job_extra_directives"),
        "header_skip": Foreign("give job_directives_skip: whole options, not parts of lines"),
        "job_script_epilogue": Foreign(
            "the job ends with the ranks and has their exit code; do what comes after in the script itself"
        ),
        "shebang": Foreign("the job script is bash; shell lines before the command are job_script_prologue"),
        "submit_command_extra": Foreign("give job_extra_directives"),
        "extra": Foreign(ARGUMENTS),
        "worker_extra_args": Foreign(ARGUMENTS, ((), [])),
        "worker_command": Foreign(WATCHED),
        "nanny": Foreign(WATCHED, (True,)),
        "scheduler_cls": Foreign(SCHEDULER),
        "scheduler_options": Foreign(SCHEDULER, ({},)),
        "shared_temp_directory": Foreign("certificates need no shared folder; leave it out"),
        "config_name": Foreign("the section of the dask configuration is hpcgpu; site names a site file"),
        "silence_logs": Foreign("no log is silenced, those of the job go to log_directory", (False,)),
    }
)
# dask-cuda 26.10 (facts/dask-cuda.md 1a) and what it hands on to LocalCluster and Worker of distributed.
DASK_CUDA: Mapping[str, Foreign] = MappingProxyType(
    {
        "CUDA_VISIBLE_DEVICES": Foreign("the batch system grants the GPUs: give gpus_per_node"),
        "default_statistics": Foreign("RMM's statistics are not kept; rmm_track_allocations counts", (False,)),
        "data": Foreign("workers have hpcgpu's own store: device_memory_limit, memory_limit, local_directory"),
        "shared_filesystem": Foreign("spilled data goes to local_directory, which is never shared between workers"),
        "enable_tcp_over_ucx": Foreign(UCX),
        "enable_infiniband": Foreign(UCX),
        "enable_nvlink": Foreign(UCX),
        "enable_rdmacm": Foreign(UCX),
        "log_spilling": Foreign("what is spilled is in the workers' metrics; leave it out", (False, True)),
        "worker_class": Foreign(WATCHED),
        "pre_import": Foreign(PRELOAD),
        "start": Foreign("the cluster starts when it is made"),
        "host": Foreign(ADDRESS),
        "ip": Foreign(ADDRESS),
        "contact_address": Foreign(ADDRESS),
        "scheduler_port": Foreign(PORTS, (0,)),
        "port": Foreign(PORTS, (0,)),
        "dashboard_address": Foreign(DASHBOARD),
        "worker_dashboard_address": Foreign("workers have no web server; " + DASHBOARD),
        "http_prefix": Foreign(DASHBOARD),
        "services": Foreign("gone from distributed; leave it out"),
        "worker_services": Foreign("gone from distributed; leave it out"),
        "service_kwargs": Foreign(DASHBOARD),
        "blocked_handlers": Foreign(SCHEDULER, ((), [])),
        "scheduler_kwargs": Foreign(SCHEDULER, ({},)),
        "scheduler_sync_interval": Foreign("give distributed's configuration; leave it out", (1,)),
        "plugins": Foreign("give them to the running cluster: Client.register_plugin", ((), [])),
        "preload": Foreign(PRELOAD),
        "preload_argv": Foreign(PRELOAD),
        "lifetime": Foreign(LIFETIME),
        "lifetime_stagger": Foreign(LIFETIME),
        "lifetime_restart": Foreign(LIFETIME, (False,)),
        "executor": Foreign("nthreads says how many threads a worker has"),
        "config": Foreign(
            "workers read Dask's configuration of the process that starts the ranks: DASK_... variables, ~/.config/dask"
        ),
    }
)
# Options of dask worker (distributed 2026.8) that "python -m hpcgpu.worker" does not have; others are in DASK_CUDA.
DASK_WORKER: Mapping[str, Foreign] = MappingProxyType(
    {
        "nanny": Foreign(WATCHED),
        "worker_port": Foreign(PORTS),
        "nanny_port": Foreign(PORTS),
        "listen_address": Foreign(ADDRESS),
        "scheduler_sni": Foreign("certificates are checked by their signer, not by names of hosts; leave it out"),
        "pid_file": Foreign("the batch system knows its job; in a shell: echo $$ > FILE; exec python -m hpcgpu.worker"),
        "dashboard_address": Foreign("workers have no web server; leave it out"),
        "dashboard_prefix": Foreign("workers have no web server; leave it out"),
    }
)
FOREIGN: Mapping[str, Foreign] = MappingProxyType({**JOBQUEUE, **DASK_CUDA})


def read_local_cuda(given: Mapping[str, object]) -> tuple[dict[str, object], dict[str, str]]:
    """Translate the keywords of dask-cuda's LocalCUDACluster for a cluster on this machine.

    Parameters
    ----------
    given : Mapping of str to object
        Keywords as users write them for LocalCUDACluster, ours among them.

    Returns
    -------
    tuple of dict and dict
        Keywords for :func:`hpcgpu.config.layers.read_settings`, and variables that the ranks start
        with (``CUDA_VISIBLE_DEVICES``: which GPUs are granted).

    Raises
    ------
    ConfigError
        No GPU, or more workers than GPUs. What has no meaning here is left to ``read_settings``, which
        names the replacement.

    """
    ours = dict(given)
    environ: dict[str, str] = {}
    visible = ours.pop("CUDA_VISIBLE_DEVICES", None)
    if visible is not None:
        devices = [d.strip() for d in visible.split(",")] if isinstance(visible, str) else _devices(visible)
        if not any(devices) or not all(devices) or len(set(devices)) < len(devices):
            raise ConfigError(
                f"CUDA_VISIBLE_DEVICES={visible!r}: no GPU, or one twice; allowed: indices or UUIDs such as '0,1'"
            )
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    workers = ours.pop("n_workers", None)
    if workers is not None:
        if ours.get("gpus_per_node") not in (None, workers):
            raise ConfigError(f"n_workers={workers!r} with gpus_per_node={ours['gpus_per_node']!r}: say one of them")
        if visible is not None and isinstance(workers, int) and workers > len(devices):
            raise ConfigError(
                f"n_workers={workers} with {len(devices)} GPUs in CUDA_VISIBLE_DEVICES: one worker per GPU"
            )
        ours["gpus_per_node"] = workers
    if ours.get("protocol") == "ucxx":
        ours["protocol"] = "ucx"
    return ours, environ


def _devices(visible: object) -> list[str]:
    if isinstance(visible, int) and not isinstance(visible, bool):
        return [str(visible)]
    if not isinstance(visible, (list, tuple)) or any(isinstance(d, bool) for d in visible):
        raise ConfigError(f"CUDA_VISIBLE_DEVICES={visible!r}; allowed: text such as '0,1', or a list")
    return [str(d).strip() for d in visible]
