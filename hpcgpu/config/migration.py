"""Options of dask-jobqueue, dask-cuda and distributed: hints, and the sections of Dask's configuration translated.

Names with the same meaning are aliases of ours, in :class:`hpcgpu.model.Settings`; nothing else is dropped silently.

Together: what cannot be translated has a hint, and a name is in one of the two.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from hpcgpu.errors import ConfigError, opt, plain
from hpcgpu.model.settings import plain_number

ANYTHING = ("*",)
_EXTRA = "job_extra_directives"
LOOPBACK = ("127.0.0.1", "localhost", "tcp://127.0.0.1", "tls://127.0.0.1")
_WATCHED = "each worker is watched by hpcgpu's own nanny; leave it out"
_SCHEDULER = "the scheduler runs on MPI rank 0 with its own options: `dashboard`, `interface`, `protocol`, `security`"
_PORTS = "ports are free ones, found at start; `interface` says on which network"
_ADDRESS = "addresses are found at start; `interface` says on which network"
_DASHBOARD = f"{opt('dashboard', True)} or False"
_DIRECTIVES = ("qos", "constraint", "reservation", "nodelist", "exclude", "gpus_per_task")
_SAME = ("queue", "walltime", "memory", "interface", "python", "log_directory", "local_directory", "death_timeout")
# Our options and dask-jobqueue's keys, the newer key before the older ones that it replaces.
_KEYS: Mapping[str, tuple[str, ...]] = {
    **{name: (name.replace("_", "-"),) for name in _SAME},
    "job_name": ("name",),
    "account": ("account", "project"),
    "job_extra_directives": ("job-extra-directives", "job-extra"),
    "job_directives_skip": ("job-directives-skip", "header-skip"),
    "job_script_prologue": ("job-script-prologue", "env-extra"),
}
_CORES = ("job-cpu", "cores")
_OWN_FOLDERS = ("$TMPDIR", "${TMPDIR}")
_WHY = {
    "local-directory": "workers have their folders there in any case",
    "python": "here it is one program",
    **dict.fromkeys(("job-directives-skip", "header-skip"), "only whole options such as '--mem' can be left out"),
}
_NOTHING: tuple[object, ...] = (None, "", 0, [], {}, ())


@dataclass(frozen=True, slots=True)
class Hint:
    """Advice for another package's option, and the values that need none because they are the default here."""

    instead: str
    harmless: tuple[object, ...] = ()  # or ANYTHING; compared as text, since True == 1

    def is_harmless(self, value: object) -> bool:
        """Return whether the value, or its text from the environment, can be ignored."""
        return self.harmless == ANYTHING or str(value).lower() in {str(h).lower() for h in self.harmless}


def _hints(rows: Mapping[str, str], **harmless: tuple[object, ...]) -> Mapping[str, Hint]:
    """Make hints from rows of names, with blanks between, and one advice for them; ``harmless`` values are by name.

    An advice names options of ours in backquotes.
    """
    options = {names: re.sub("`(.*?)`", lambda option: opt(option[1], None), text) for names, text in rows.items()}
    advice = {name: text for names, text in options.items() for name in names.split()}
    return MappingProxyType({name: Hint(text, harmless.get(name, ())) for name, text in advice.items()})


# dask-jobqueue 0.9: a job of ours has many nodes and one worker per GPU.
JOBQUEUE = _hints(
    {
        "processes": "there is one worker per GPU: give `gpus_per_node`",
        "n_workers": "there is one worker per GPU: give `nodes` and `gpus_per_node`",
        "job_cpu ncpus": "give `cores_per_gpu`, the cores asked for each GPU",
        "job_mem mem": "give `memory`, the memory asked for on each node",
        "resource_spec": "it is written from `nodes`, `gpus_per_node`, `cores_per_gpu` and `memory`; what a site adds "
        "to each chunk stands in its site file (dialect.resources)",
        "job_extra submit_command_extra": "give `job_extra_directives`",
        "header_skip": "give `job_directives_skip`: whole options, not parts of lines",
        "job_script_epilogue": "the job ends with the ranks and has their exit code; do what comes after in the script "
        "itself",
        "shebang": "the job script is bash; shell lines before the command are `job_script_prologue`",
        "extra worker_extra_args": "a worker's options are options of the cluster: `nthreads`, `memory_limit`, "
        "`resources`, `local_directory`, `env`",
        "worker_command nanny": _WATCHED,
        "scheduler_cls scheduler_options": _SCHEDULER,
        "shared_temp_directory": "certificates need no shared folder; leave it out",
        "config_name": "the section of the dask configuration is hpcgpu; `site` names a site file",
        "silence_logs": "logs of workers never come to this process, whatever the level",
    },
    **{"processes": (True,), "nanny": (True,), "worker_extra_args": ((), []), "scheduler_options": ({},)},
    silence_logs=ANYTHING,
    worker_command=("distributed.cli.dask_worker", "hpcgpu.worker"),
    shebang=("#!/usr/bin/env bash", "#!/bin/bash"),
)
# dask-cuda 26.10, and what it passes on to LocalCluster and Worker of distributed.
DASK_CUDA = _hints(
    {
        "CUDA_VISIBLE_DEVICES": "the batch system grants the GPUs: give `gpus_per_node`",
        "default_statistics": "RMM's statistics are not kept; `rmm_track_allocations` counts",
        "data": "workers have hpcgpu's own store: `device_memory_limit`, `memory_limit`, `local_directory`",
        "shared_filesystem": "spilled data goes to `local_directory`, which is never shared between workers",
        "enable_tcp_over_ucx enable_infiniband enable_nvlink enable_rdmacm": "UCX chooses its transports itself; leave "
        f"it out, or give {opt('env', {'UCX_TLS': '...'})}",
        "log_spilling": "what is spilled is in the workers' metrics; leave it out",
        "worker_class": _WATCHED,
        "multiprocessing_method": "workers are forked by one process that has imported Dask; leave it out",
        "pre_import preload preload_argv": "workers load nothing at start; Client.register_plugin, once the cluster is "
        "there, does it in all of them",
        "start": "the cluster starts when it is made",
        "host ip contact_address": _ADDRESS,
        "port": _PORTS,
        "diagnostics_port": "give `dashboard_port`",  # of distributed 2025.4
        "dashboard_link": "give `dashboard_port`; its form is Dask's configuration distributed.dashboard.link",
        "worker_dashboard_address": f"workers have no web server; {_DASHBOARD} is the scheduler's",
        "http_prefix service_kwargs": f"the dashboard is on loopback, on a free port behind a secret: {_DASHBOARD}",
        "services worker_services": "gone from distributed; leave it out",
        "blocked_handlers scheduler_kwargs": _SCHEDULER,
        "scheduler_sync_interval": "give distributed's configuration; leave it out",
        "plugins": "give them to the running cluster: Client.register_plugin",
        "lifetime lifetime_stagger lifetime_restart": "`walltime` says how long the job lives, and `drain` how long "
        "before its end workers hand their data to others",
        "executor": "`nthreads` says how many threads a worker has",
        "config": "workers read Dask's configuration of the process that starts the ranks: DASK_... variables, "
        "~/.config/dask",
    },
    **{"default_statistics": (False,), "log_spilling": (False, True), "host": LOOPBACK, "ip": LOOPBACK, "port": (0,)},
    **{"blocked_handlers": ((), []), "scheduler_kwargs": ({},), "scheduler_sync_interval": (1,), "plugins": ((), [])},
    **dict.fromkeys(("enable_tcp_over_ucx", "enable_infiniband", "enable_nvlink", "enable_rdmacm"), (False,)),
    lifetime_restart=(False,),
)
# Options of dask worker (distributed 2026.8) that "python -m hpcgpu.worker" does not have; others are in DASK_CUDA.
DASK_WORKER = _hints(
    {
        "nanny": _WATCHED,
        "worker_port nanny_port": _PORTS,
        "listen_address": _ADDRESS,
        "scheduler_sni": "certificates are checked by their signer, not by names of hosts; leave it out",
        "pid_file": "the batch system knows its job; in a shell: echo $$ > FILE; exec python -m hpcgpu.worker",
        "dashboard_address dashboard_prefix": "workers have no web server; leave it out",
    }
)
# Words of Slurm, PBS and other clusters that are no option here.
FIELD = _hints(
    {
        "gres ngpus n_gpus num_gpus num_workers ntasks ntasks_per_node": "give `gpus_per_node`: there is one worker "
        "per GPU",
        "cpus_per_task cpus_per_gpu cpus n_cores num_cores": "give `cores_per_gpu`",
        **{n: f"give {opt(_EXTRA, [f'--{n}=...'])} (PBS: '-l {n}=...')" for n in _DIRECTIVES},
        "exclusive": f"give {opt(_EXTRA, ['--exclusive'])} (PBS: '-l place=excl')",
        "time time_limit wall_time runtime": "give `walltime`",
        "mem_per_cpu mem_per_gpu mem_per_node": "give `memory`, of each node",
        "num_nodes n_nodes nnodes node_count": "give `nodes`",
    }
)
HINTS: Mapping[str, Hint] = MappingProxyType({**FIELD, **JOBQUEUE, **DASK_CUDA})


def read_local_cuda(keywords: Mapping[str, object]) -> tuple[dict[str, object], dict[str, str]]:
    """Translate LocalCUDACluster's keywords into settings and variables for the ranks; ConfigError for wrong GPUs.

    Unknown keywords stay: ``read_settings`` names what replaces them. CUDA_VISIBLE_DEVICES has the granted GPUs.
    """
    ours = dict(keywords)
    environ: dict[str, str] = {}
    if "dashboard_address" in ours and ours["dashboard_address"] is None:  # as LocalCluster has it
        ours["dashboard"] = ours.get("dashboard", False)
    visible = ours.pop("CUDA_VISIBLE_DEVICES", None)
    if visible is not None:
        entries = visible.split(",") if isinstance(visible, str) else visible
        entries = entries if isinstance(entries, (list, tuple)) else [entries]
        devices = [str(d).strip() for d in entries if isinstance(d, (int, str)) and not isinstance(d, bool)]
        if not devices or not all(devices) or len(set(devices)) < len(entries):
            raise ConfigError(
                f"CUDA_VISIBLE_DEVICES={visible!r}: no GPU, or one twice; allowed: indices or UUIDs, as text such as "
                "'0,1' or as a list"
            )
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    if str(ours.get("gpus")).removeprefix("-").isdecimal() and "gpus_per_node" not in ours:
        ours["gpus_per_node"] = ours.pop("gpus")  # of this machine
    workers = ours.pop("n_workers", None)
    if visible is not None and workers is None:
        ours.setdefault("gpus_per_node", len(devices))
    if workers is not None:
        if ours.get("gpus_per_node") not in (None, workers):
            each = opt("gpus_per_node", ours["gpus_per_node"])
            raise ConfigError(f"n_workers={workers!r} with {each}: say one of them")
        if visible is not None and isinstance(workers, int) and workers > len(devices):
            raise ConfigError(
                f"n_workers={workers} with {len(devices)} GPUs in CUDA_VISIBLE_DEVICES: one worker per GPU"
            )
        ours["gpus_per_node"] = workers
    return ours, environ


def translate(section: Mapping[str, object], gpus_per_node: int | None) -> tuple[dict[str, object], dict[str, str]]:
    """Translate a section to our options' values, and the key of each; raise ConfigError for a bad number of cores.

    null, 0 and empty values are left out, and cores too if ``gpus_per_node``, which divides them, is unknown.
    """
    entries = _set_entries(section)
    values: dict[str, object] = {}
    keys: dict[str, str] = {}
    for name, theirs in _KEYS.items():
        if key := next((k for k in theirs if k in entries), None):
            value = _taken(key, entries[key])
            if value not in _NOTHING:
                values[name], keys[name] = value, key
    if gpus_per_node and (key := next((k for k in _CORES if k in entries), None)):
        count = plain_number(entries[key])
        if count is None or count < 1:
            raise ConfigError(f"cores of a job: {entries[key]!r} is no count; allowed: a whole number from 1")
        values["cores_per_gpu"], keys["cores_per_gpu"] = max(int(count) // gpus_per_node, 1), key
    return values, keys


def ignored(section: Mapping[str, object]) -> tuple[str, ...]:
    """Return the parts of a section that have no effect here, each with what to write instead."""
    entries = _set_entries(section)
    translated = {key for keys in _KEYS.values() for key in keys} | set(_CORES)
    out = []
    for key, value in entries.items():
        if key not in translated:
            hint = HINTS.get(key.replace("-", "_"))
            if not hint or not hint.is_harmless(value):
                out.append(f"{key} ({plain(hint.instead) if hint else 'no option of hpcgpu'})")
        elif _taken(key, value) != value:
            out.append(f"{key}: {value!r} ({_WHY[key]})")
    return tuple(out)


def without(section: Mapping[str, object], defaults: Mapping[str, object]) -> dict[str, object]:
    """Return a section without the defaults that ``import dask_jobqueue`` adds to Dask's configuration."""
    added = {(key.replace("_", "-"), repr(value)) for key, value in defaults.items()}
    return {key: value for key, value in section.items() if (key.replace("_", "-"), repr(value)) not in added}


def _set_entries(section: Mapping[str, object]) -> dict[str, object]:
    return {key.replace("_", "-"): value for key, value in section.items() if value not in _NOTHING}


def _taken(key: str, value: object) -> object:
    """Return the part of a value that has an effect here."""
    if key == "python" and isinstance(value, str) and len(value.split()) > 1:
        return None  # dask-jobqueue pastes it: "apptainer exec image python"
    if key == "local-directory" and value in _OWN_FOLDERS:
        return None
    if key in ("job-directives-skip", "header-skip") and isinstance(value, (list, tuple)):
        # dask-jobqueue leaves out every line that contains the text
        return [text for text in value if str(text).startswith("-")]
    return value
