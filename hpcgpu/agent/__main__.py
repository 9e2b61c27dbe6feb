"""Run one rank, ``python -m hpcgpu.agent``: its document, resources, rendezvous, layout, then leader or follower."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hpcgpu.agent.leader_socket import follow
from hpcgpu.agent.meet_by_mpi import meet_by_mpi
from hpcgpu.agent.missing_ranks import MissingRanks
from hpcgpu.errors import ConfigError, HpcGpuError, LaunchError, WorldError, opt, whole
from hpcgpu.host import log, process, remover
from hpcgpu.launch.environment import SESSION_FOLDER, is_isolated, read_allocation, read_launch, read_rank
from hpcgpu.model import CpuSet
from hpcgpu.model.allocation import DOCUMENT, OWN, WRITTEN, BootstrapSettings

if TYPE_CHECKING:
    from pathlib import Path

    from hpcgpu.agent.fork_server import LeaderResources
    from hpcgpu.agent.rank0 import SchedulerProcess
    from hpcgpu.model import Layout, RunDocument, WorkerSpec


Records = list[dict[str, Any]]
_NAMES = 16  # characters of a launch that name its folder; messages show them, the others are a secret
# Rank 0 reports errors that all ranks have. A launcher that ends all ranks with the first failed one would end rank 0
# before its report (mpirun of Open MPI 5.0.11, under load).
_RANK_0_SAYS_IT_S = 1.0


def read_bootstrap_settings(text: str) -> BootstrapSettings:
    """Parse the bootstrap settings of a rendered run document; raise ConfigError for other text."""
    if not text:
        raise ConfigError(
            f"this rank has no run document: {DOCUMENT} is not set. The command that starts the ranks "
            f"({opt('launcher', None)}, {opt('python', None)}) must hand this variable on"
        )
    # Making and checking all settings takes 20 CPU ms (Python 3.11), which a rank that only waits need not spend.
    try:
        raw = json.loads(text)
        settings = {name: value for name, value in raw["settings"].items() if name in WRITTEN}
        return BootstrapSettings(**{name: raw[name] for name in OWN}, **settings)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        from hpcgpu import config

        config.read_document(text)  # raises with the exact fault
        raise ConfigError(f"not a run document of this hpcgpu ({error}): {text[:80]!r}") from error


class Rank:
    """The process as one of the world's ranks. Each reads the bootstrap settings; leaders, which are few, the whole."""

    def __init__(self, document: str, environ: Mapping[str, str]) -> None:
        self._document, self._environ = document, environ
        self._bootstrap = read_bootstrap_settings(document)
        self._allocation = read_allocation(environ)
        self._facts = self._allocation.rank
        self.exit_file = "" if self._facts.rank else self._bootstrap.exit_file  # for rank 0's exit code
        self._host = self._allocation.node_name or os.uname().nodename
        # A rank starts its own workers if it has its own devices, or if the launcher names no local rank.
        own_devices = is_isolated(environ) and self._bootstrap.gpus is None
        self._isolated = self._facts.local_rank is None or own_devices
        self._scheduler: SchedulerProcess | None = None
        self._folder: Path | None = None
        self._failure = ""
        self._held = contextlib.ExitStack()

    @functools.cached_property
    def _run(self) -> RunDocument:
        from hpcgpu import config

        run = config.read_document(self._document)
        if run.settings.is_typed:
            from hpcgpu.config.values import as_typed

            HpcGpuError.form = as_typed
        return run

    def run(self) -> int:
        """Meet the others, then do this rank's part until the run ends; return the exit code."""
        from hpcgpu.model import Layout
        from hpcgpu.plan.layout import RankRecord, plan_layout

        # Slurm's warning before the time limit reaches every process; only a leader has something to do then
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        rank, shape = self._facts.rank, self._bootstrap.shape
        if self._facts.launcher not in ("none", "pbs_tmrsh"):  # the parent of a task of PBS may start anew
            # SIGKILL of mpirun leaves its ranks alive (Open MPI 5.0.11)
            process.die_with_parent(os.getppid(), signal.SIGTERM)
        with self._held:
            resources = None
            try:
                if self.exit_file:
                    from hpcgpu.host import private

                    private.check_exit_file(self.exit_file, self._host)
                self._check_lease()
                if self._isolated or self._facts.local_rank == 0:
                    resources = self._make_resources()
                    if rank == 0 and shape != "member":
                        from hpcgpu.agent.rank0 import SchedulerProcess

                        local = self._all_on_one_node()
                        self._scheduler = SchedulerProcess(self._run, resources, self._allocation, local=local)
            except Exception as e:
                self._failure = str(e) if isinstance(e, HpcGpuError) else process.refused(e)
                if not self._failure:  # else reported in the rendezvous: the others would wait for this rank
                    raise
            records = self._meet(resources)
            if shape == "head" and resources:
                return self._serve(resources, records[0]["scheduler"], Layout(()))
            met = [RankRecord(*(record[name] for name in RankRecord._fields)) for record in records]
            each, beside = self._bootstrap.workers_per_gpu, self._bootstrap.cpu_workers
            layout = plan_layout(
                met,
                self._allocation.node_count,
                each,
                beside,
                scheduler=shape != "member",
                without_gpus=self._bootstrap.gpus_per_node == 0,
            )
            home = layout.node_of(rank)
            if home.leader != rank:
                process.outlast(signal.SIGTERM)
                return follow(rank, records[home.leader]["leader_socket"])
            if resources is None:
                resources = self._make_resources(after_mpi=True)
            return self._lead(resources, records, layout)

    def _check_lease(self) -> None:
        """Raise LaunchError if this job's cluster no longer has a client."""
        if self._facts.rank or not self._bootstrap.folder:
            return
        from pathlib import Path

        from hpcgpu.deploy.network import lease

        folder, grace_s = self._bootstrap.folder, self._run.settings.client_grace_s
        if not lease.is_held(Path(folder), grace_s):
            raise LaunchError(
                f"the client of this cluster is gone: in {folder} it has given no sign of life for over {grace_s:g} s "
                "(client_grace), and it has not detached"
            )

    def _make_resources(self, *, after_mpi: bool = False) -> LeaderResources:
        """Make a leader's resources, held to the end; ranks that only wait do without the imports for them."""
        from hpcgpu.agent.fork_server import LeaderResources

        return self._held.enter_context(LeaderResources.make(self._run.settings, after_mpi=after_mpi))

    def _meet(self, resources: LeaderResources | None) -> Records:
        """Return the records of all ranks; raise WorldError if one of them has failed."""
        bootstrap = self._bootstrap
        if self._facts.size == 1:
            records = [self._record(resources)]
        elif bootstrap.rendezvous == "file":
            from hpcgpu.agent import meet_by_files

            self._folder = folder_of(bootstrap, self._environ)
            if self._facts.rank == 0 and not bootstrap.launch:
                meet_by_files.clear_old(self._folder.parent)
            record = self._record(resources)
            records = meet_by_files.meet_by_files(record, self._facts, self._folder, bootstrap.death_timeout_s)
        else:
            launch = "" if self._isolated else read_launch(self._environ)
            key = bootstrap.launch[_NAMES:]  # empty if the ranks were started by the user's own launcher
            folder = functools.partial(folder_of, bootstrap, self._environ)
            facts, limit_s = self._facts, bootstrap.death_timeout_s
            with MissingRanks(facts, self._environ, self._host, folder, limit_s).watched(self._held.close):
                records = meet_by_mpi(lambda: self._record(resources), facts, launch, key)
        for record in records:
            if "failure" in record:
                where = f"rank {record['rank']} on {record['host']}: " if len(records) > 1 else ""
                raise WorldError(f"{where}{record['failure']}")
        return records

    def _record(self, resources: LeaderResources | None) -> dict[str, Any]:
        """Return this rank's record for the rendezvous."""
        record = {"rank": self._facts.rank, "host": self._host}
        try:
            if self._failure:
                raise LaunchError(self._failure)
            return record | {
                "isolated": self._isolated,
                "leader_socket": resources.leader_socket.path if resources else "",
                "scheduler": self._scheduler.record() if self._scheduler else None,
                **(granted(self._bootstrap, self._environ) if self._bootstrap.shape != "head" else {}),
            }
        except HpcGpuError as e:
            return record | {"failure": str(e)}

    def _all_on_one_node(self) -> bool:
        facts = self._facts
        one_step = facts.launcher == "srun" and self._environ.get("SLURM_STEP_NUM_NODES") == "1"
        # without a batch system the cluster object that started the ranks is on this machine, too
        shape = self._bootstrap.shape
        elsewhere = shape == "head" or (shape == "gang" and self._allocation.batch != "local")
        return not elsewhere and (facts.size in (1, facts.local_size) or one_step)

    def _lead(self, resources: LeaderResources, records: Records, layout: Layout) -> int:
        """Run this node's workers until the end; on rank 0 the whole run."""
        import asyncio
        import shutil

        from hpcgpu.agent.leader import report_failure

        rank, scheduler = self._facts.rank, records[0]["scheduler"]
        try:
            try:
                workers, notes = plan_node(self._run, self._environ, str(resources.scratch.path), records, layout, rank)
            except HpcGpuError as e:
                if rank and scheduler:
                    asyncio.run(report_failure(scheduler, f"{self._host}: {e}"))
                raise
            os.sched_setaffinity(resources.fork_server.pid, os.sched_getaffinity(0))
            return self._serve(resources, scheduler, layout, workers=workers, notes=notes)
        finally:
            resources.leader_socket.dismiss(len(layout.node_of(rank).ranks) - 1)
            if self._folder and rank == 0:
                shutil.rmtree(self._folder, ignore_errors=True)

    def _serve(
        self, resources: LeaderResources, scheduler: Mapping[str, Any] | None, layout: Layout, **node: Any
    ) -> int:
        """Lead: with the scheduler, beside it, or in a job that joins one."""
        import asyncio

        from hpcgpu.agent.leader import ForcedEnd, Leader, LeaderContext
        from hpcgpu.agent.member import Member
        from hpcgpu.agent.rank0 import Rank0Leader, protocol

        process.hide_gpus(protocol(self._run.settings))
        node |= {"environ": self._environ, "node": self._host, "in_job": self._allocation.batch != "local"}
        context = LeaderContext(run=self._run, scheduler=scheduler or {}, fork_server=resources.fork_server, **node)

        async def lead() -> int:
            leader = Leader(context) if context.scheduler else Member(context)
            if self._scheduler:
                leader = Rank0Leader(context, self._scheduler, layout)
            leader.on_end = forced.begin
            return await leader.run()

        with ForcedEnd(resources.fork_server) as forced:
            return asyncio.run(lead())


def folder_of(bootstrap: BootstrapSettings, environ: Mapping[str, str]) -> Path:
    """Return the folder of this run's rendezvous: the document's, or one of this launch alone; or raise LaunchError."""
    from pathlib import Path

    from hpcgpu.host.private import user_folder

    if bootstrap.launch and bootstrap.folder and bootstrap.shape != "member":  # that is the whole cluster's
        return Path(bootstrap.folder) / f"ranks-{bootstrap.launch[:_NAMES]}"
    if not (launch := bootstrap.launch[:_NAMES] or read_launch(environ)):
        raise LaunchError(
            f"{opt('rendezvous', 'file')} needs 'hpcgpu launch', srun, or the mpirun of Open MPI or PALS: "
            "nothing tells this launch from another"
        )
    return user_folder("rendezvous") / launch


def granted(bootstrap: BootstrapSettings, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the resources that this rank may use, for its record in the rendezvous."""
    if bootstrap.gpus is not None:
        from hpcgpu.model.allocation import parse_simulated

        count, devices, trouble = parse_simulated(bootstrap.gpus).per_node, "", ""
    else:
        from hpcgpu.host import nvml

        facts, devices = nvml.read(), environ.get("CUDA_VISIBLE_DEVICES", "")
        count, trouble = len(nvml.visible_gpus(facts.gpus, environ.get("CUDA_VISIBLE_DEVICES"))), facts.trouble
    per_node, cpus = bootstrap.gpus_per_node, str(CpuSet(os.sched_getaffinity(0)))
    return {
        "gpus": count if per_node is None else min(count, per_node),
        "devices": devices,
        "cpus": cpus,
        "trouble": trouble,
    }


def plan_node(
    run: RunDocument, environ: Mapping[str, str], scratch: str, records: Records, layout: Layout, rank: int
) -> tuple[tuple[WorkerSpec, ...], tuple[str, ...]]:
    """Return the workers of the leader ``rank``, and messages; LaunchError if GPUs of ``gpus_per_node`` are missing."""
    from dataclasses import replace  # brings inspect

    from hpcgpu.deploy.processes.node import facts_of, folder_notes, requested_gpus
    from hpcgpu.host import discover  # psutil takes 30 CPU ms, which every rank would pay
    from hpcgpu.plan.binding.workers import node_warnings, plan_workers, share_of

    home, host, settings = layout.node_of(rank), records[rank]["host"], run.settings
    here = [n for n in layout.nodes if records[n.leader]["host"] == host]
    topology = discover.topology()
    gpus = requested_gpus(settings, topology, environ, host)
    masks = {r: CpuSet.parse(records[r]["cpus"]) for r in home.ranks}
    os.sched_setaffinity(0, CpuSet().union(*masks.values()))
    allocation = read_allocation(environ, host)
    facts = facts_of(host, topology, gpus, environ, run)
    memory = share_of(facts.memory, home.worker_count, sum(n.worker_count for n in here))
    facts = replace(facts, memory=memory, scratch=scratch, masks=masks if settings.respect_launcher else {})
    if run.shape == "member":  # named by their job; without a batch system, and an id from elsewhere, that is a process
        facts = replace(facts, job_id=allocation.job_id or str(os.getpid()), restart_count=allocation.restart_count)
    workers = tuple(spec for _, spec in plan_workers(settings, facts, home, [n for n in here if n.node < home.node]))
    notes = (*(topology.warnings if settings.gpus is None else ()), *process.replaced(os.environ, settings.env))
    notes += node_warnings(settings, masks, workers, facts.ucx_without_ib)
    if home is here[0]:
        notes += folder_notes(settings, sum(n.worker_count for n in here))
    log.say_of(host, notes)
    return workers, notes


def main(document: str) -> int:
    """Run one rank; return its exit code. Rank 0 also writes the code to the exit file for its launcher."""
    number = read_rank(os.environ).rank
    if number == 0 and sys.flags.safe_path and not os.environ.get("PYTHONSAFEPATH"):
        from pathlib import Path

        from hpcgpu.host.path_writers import changed_by

        who = changed_by(folder := Path.cwd(), by_new_files=True) or "others can change it"
        log.say(
            f"modules in {folder} are not imported: {who}, and so run code as you. If you trust them: "
            f"export PYTHONPATH={shlex.quote(str(folder))}"
        )
    code, path = 1, ""
    try:
        rank = Rank(document, dict(os.environ))
        path = rank.exit_file
        code = rank.run()
    except Exception as e:
        _say(e, number)
    if path:
        from hpcgpu.host import private

        private.write_exit_code(path, code)
    return code


def _say(error: Exception, number: int) -> None:
    """Log why a rank ends, with a traceback if the error is unexpected or HPCGPU_DEBUG is set."""
    message = whole(error) if isinstance(error, HpcGpuError) else process.refused(error)
    if number and isinstance(error, WorldError):
        time.sleep(_RANK_0_SAYS_IT_S)
    elif message:
        log.say(message)
    if not message or os.environ.get("HPCGPU_DEBUG"):
        sys.excepthook(type(error), error, error.__traceback__)


if __name__ == "__main__":
    log.open_missing()
    os.environ.pop(SESSION_FOLDER["openmpi-4"][0], None)  # of this launch: the script's own mpirun has another
    if (stage := os.environ.pop(remover.STAGED_IN, "")) and not read_rank(os.environ).local_rank:
        atexit.register(remover.leave, stage)  # the first one registered is the last one called
    exit_code = main(os.environ.pop(DOCUMENT, ""))
    log.finish()
    sys.exit(exit_code)
