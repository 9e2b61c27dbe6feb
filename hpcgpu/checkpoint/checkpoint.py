"""The user's object: persist a collection under a name, load it, see how far it is."""

from __future__ import annotations

import asyncio
import base64
import contextvars
import functools
import logging
import math
import stat
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar, cast

from hpcgpu.deploy import compat as compat  # refuses a distributed whose dask has other names

# isort: split
from dask._task_spec import Task, convert_legacy_graph, cull
from dask.base import collections_to_expr
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer
from distributed import Client, Future, default_client, wait
from distributed.protocol.pickle import dumps

from hpcgpu import supervise
from hpcgpu.batch import get
from hpcgpu.checkpoint import values, writer
from hpcgpu.checkpoint.computation import Computation
from hpcgpu.checkpoint.folder import FORMAT, Folder, Manifest
from hpcgpu.checkpoint.nests import as_collection, filled, keys_of, leaves, rebuilt
from hpcgpu.checkpoint.progress import NameProgress, Progress, ProgressLine, progress_of, troubles_of
from hpcgpu.checkpoint.scheduler import FinishedChunks, forget, offer
from hpcgpu.checkpoint.segments import Chunk
from hpcgpu.checkpoint.writer import CheckpointPlugin, outputs_of, part_of
from hpcgpu.deploy.jobs.batch_client import ask
from hpcgpu.errors import CheckpointError, ConfigError
from hpcgpu.host import private
from hpcgpu.model import JobState
from hpcgpu.supervise import reason_of
from hpcgpu.units import counted

logger = logging.getLogger("distributed.hpcgpu")
Method = TypeVar("Method", bound=Callable[..., Any])
_OPTIONS = ("overwrite", "alike", "workers", "allow_other_workers", "resources", "retries", "priority")
_SHOWN = 5
_NEWS_S = 10.0  # for workers to tell the scheduler what is on disk


def _awaited(method: Method) -> Method:
    """Return an awaitable where the client is asynchronous, as distributed's methods do; a thread does the work."""

    @functools.wraps(method)
    def call(self: Checkpoint, *args: Any, **kwargs: Any) -> Any:
        if self.asynchronous:
            context = contextvars.copy_context()  # may have the current client
            return supervise.to_thread(context.run, functools.partial(method, self, *args, **kwargs))
        return method(self, *args, **kwargs)

    return cast("Method", call)


class Checkpoint:
    """A folder in which finished chunks of collections are kept, so that a script that starts again goes on.

    Works on any Dask cluster whose workers and scheduler have hpcgpu, if workers see the folder. Workers write in the
    background. Make it in the script, also in a script that starts again; one process at a time may write. With an
    asynchronous client, methods return awaitables, and ``async with`` takes the place of ``with``.

    Parameters
    ----------
    folder : str or path
        A folder of yours that all nodes see; it is made with mode 0700.
    client : distributed.Client, optional
        The client of the cluster; the current one if not given.
    trust_folder : bool
        Accept a folder that other users own or can change. To load a checkpoint runs code that is in it.

    Examples
    --------
    ::

        with Checkpoint("/scratch/me/run1") as checkpoint:
            x = checkpoint.persist(x, name="x")   # as client.persist
            print(x.sum().compute())

    """

    def __init__(self, folder: str | Path, client: Client | None = None, *, trust_folder: bool = False) -> None:
        path = Path(folder).expanduser().absolute()
        self._trusted, self._chosen_client = trust_folder, client
        self._lock = threading.RLock()  # awaitables may run at the same time
        self._folder = Folder(path, trusted=trust_folder)
        self._plugins: dict[str, str] = {}  # the run of each name whose chunks the workers write
        self._restored: dict[str, dict[Any, Task]] = {}  # tasks that load, by name: a key keeps its task
        self._scheduler = ""  # whose workers have these plugins
        self._future_digests: dict[Any, str] = {}  # digests of keys that are futures now
        self._line: ProgressLine | None = None

    def __enter__(self) -> Self:
        if self.asynchronous:
            raise ConfigError("a checkpoint of an asynchronous client is used with async with")
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        closing: Any = self.close()
        if self.asynchronous:
            await closing

    def __repr__(self) -> str:
        return f"Checkpoint({str(self._folder.path)!r})"

    @property
    def asynchronous(self) -> bool:
        """True if methods return awaitables, as the client is asynchronous."""
        try:
            return bool((self._chosen_client or default_client()).asynchronous)
        except ValueError:  # no client
            return False

    @property
    def names(self) -> tuple[str, ...]:
        """The names in the folder."""
        return self._folder.names

    @_awaited
    def persist(
        self, collection: Any, name: str, *, overwrite: bool = False, alike: bool = False, **options: Any
    ) -> Any:
        """Start computing a collection, as ``client.persist``; its chunks are written when they are finished.

        Chunks that are in the folder are read, and not computed. So are damaged ones computed again, and named.

        Parameters
        ----------
        collection : a Dask collection or a future
            An array, a frame, a bag, a delayed value or a future; or a dict, list or tuple of them.
        name : str
            Its name in the folder, the same in each start of the script.
        overwrite : bool
            Take the collection, even if the name stands for another computation, whose chunks are then lost.
        alike : bool
            Take the chunks of a graph with other arguments but the same tasks: random numbers without a seed.
        **options
            Of ``client.persist``: ``workers``, ``allow_other_workers``, ``resources``, ``retries``, ``priority``.

        Returns
        -------
        Dask collection or future
            Of the same kind, on the cluster; or a dict, list or tuple of them.

        Raises
        ------
        ConfigError
            The name stands for another computation; another process writes to the folder; a worker does not see it.

        """
        if unknown := sorted(options.keys() - set(_OPTIONS)):  # client.persist ignores them
            raise ConfigError(f"persist has no option {', '.join(unknown)}; it has {', '.join(_OPTIONS)}")
        with self._lock:
            return self._persist(self._client(), collection, name, overwrite=overwrite, alike=alike, options=options)

    @_awaited
    def load(self, name: str) -> Any:
        """Return the collection of a name without computing it: its chunks are read when they are needed.

        Needs no cluster. Where there is no GPU, arrays of CuPy are NumPy's.

        Raises
        ------
        CheckpointError
            Not all of its chunks are in the folder.

        """
        manifest = self._manifest(name)
        index = self._folder.index
        with self._lock:
            index.refresh()
            index.check()
        template = values.from_frames([zlib.decompress(base64.b64decode(manifest.template))])
        parts = [leaf for _, leaf in leaves(template)]
        keys = keys_of(parts)
        outputs = outputs_of(keys)
        chunks = {key: Chunk(manifest.run, part_of(key, outputs) or ()) for key in keys}
        if missing := sum(chunk not in index.chunks for chunk in chunks.values()):
            raise CheckpointError(
                f"{name!r} in {self._folder.path} has {len(keys) - missing} of {len(keys)} chunks: run its script again"
            )
        graph = {key: self._load_task(key, chunk) for key, chunk in chunks.items()}
        return filled(template, iter([rebuilt(part, graph) for part in parts]))

    @_awaited
    def progress(self) -> Progress:
        """Return how far each name is, and what hinders the workers; reads the folder."""
        rows = self._rows()
        statuses = self._statuses(writer.status) if self._plugins else []
        return Progress(rows, sum(status.waiting for status in statuses), troubles_of(statuses))

    def follow(self, every_s: float = 30.0) -> None:
        """Show until :meth:`close` how many chunks of each name are on disk.

        It is one line that changes in a terminal or notebook, and elsewhere a line when it has changed, at most each
        ``every_s`` seconds. A thread reads the folder for it.
        """
        self._line = self._line or ProgressLine(self._rows, every_s)

    @_awaited
    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all finished chunks are on disk; return whether they are: a disk may be full, or the time over."""
        statuses: list[writer.Status] = []
        waiting, left, end_s, before = 0, int(bool(self._plugins)), math.inf, math.inf
        while left and not waiting and time.monotonic() < end_s:  # the scheduler hears of it, or has others write
            statuses = self._statuses(writer.flush, timeout_s)
            waiting, last = sum(status.waiting for status in statuses), left
            left, number = self._client().run_on_scheduler(offer, str(self._folder.path), before)
            before = min(before, number)  # not those that come meanwhile
            end_s = end_s if left == last else time.monotonic() + _NEWS_S
        waiting, troubles = waiting or left, troubles_of(statuses)
        if waiting or troubles:
            lacks = counted(waiting + sum(len(status.unsaved) for status in statuses), "chunk")
            logger.warning("the checkpoint in %s lacks %s: %s", self._folder.path, lacks, "; ".join(troubles))
        return not waiting and not troubles

    @_awaited
    def remove(self, name: str) -> None:
        """Forget a name; files with chunks of other names stay."""
        with self._lock:
            self._folder.take(self._poll)
            self._stop(name)
            self._folder.remove(name)

    @_awaited
    def close(self) -> None:
        """Write what is finished, and let another process write; the collections stay on the cluster."""
        is_mine = self._folder.is_mine  # else another object of this process goes on with the workers' plugins
        try:
            if is_mine:
                self.flush()
            for name in tuple(self._plugins) if is_mine else ():
                self._stop(name)
        except Exception as e:  # the cluster has gone; an error of the script is to be seen, not this one
            logger.warning("the checkpoint in %s could not be flushed: %s", self._folder.path, reason_of(e))
        finally:
            if self._line:
                self._line.close()
                self._line = None
            if is_mine:
                self._folder.release()

    def _rows(self) -> tuple[NameProgress, ...]:
        with self._lock:
            return progress_of(self._folder)

    def _client(self) -> Client:
        try:
            return self._chosen_client or default_client()
        except ValueError as e:
            raise ConfigError("a checkpoint is written by a cluster: make a Client, or pass client=") from e

    def _persist(
        self, client: Client, nest: Any, name: str, *, overwrite: bool, alike: bool, options: dict[str, Any]
    ) -> Any:
        before = self._open(client).manifest(name)
        computation = Computation.of(nest, self._future_digests)
        if before and not overwrite and (texts := before.computation.differences(computation, alike=alike)):
            is_alike = not before.computation.differences(computation, alike=True)
            raise ConfigError(
                f"{name!r} in {self._folder.path} is another computation ({'; '.join(texts)}). Give another name, or "
                "pass overwrite=True: what is there is lost then"
                + (", or alike=True, if its arguments are new in each start, as random numbers" if is_alike else "")
            )
        originals = [leaf for _, leaf in leaves(nest)]
        # a frame's keys are those of its optimized expression
        collections = [each.optimize() if _is_frame(each) else each for each in map(as_collection, originals)]
        keys = keys_of(collections)
        if before and before.unreadable:
            logger.warning("%r %s", name, before.unreadable)
        if before is None or before.unreadable or overwrite:
            before = self._folder.write(name, computation, len(keys), _template(nest, collections))
        outputs = outputs_of(keys)
        # the scheduler keeps them until they have a place in the result
        loaded = self._begin(client, name, before, {part_of(key, outputs): key for key in keys}, outputs, options)
        graph = _graph(collections, keys, self._restored[name])
        futures = dict(zip(keys, client.get(graph, keys, sync=False, **options), strict=True))
        del loaded
        digest = computation.digests[""]
        self._future_digests |= {key: f"{digest} {part_of(key, outputs)}" for key in keys}
        results = [rebuilt(each, futures) for each in collections]
        pairs = zip(originals, results, strict=True)
        return filled(nest, iter([futures[new.key] if isinstance(old, Future) else new for old, new in pairs]))

    def _open(self, client: Client) -> Folder:
        """Become the owner of the folder, which all workers must see."""
        folder = self._folder
        scheduler = client.scheduler_info(n_workers=0).get("id", "")
        if scheduler != self._scheduler:  # another one after a requeue
            self._scheduler = scheduler
            self._plugins.clear()
            self._restored.clear()
            self._future_digests.clear()
            if folder.token:
                folder.index.check()  # what its workers had not synced
        if folder.token and folder.is_mine:
            return folder
        folder.make(trusted=self._trusted)
        folder.take(self._poll)
        folder.clean()
        folder.index.check()
        seen = client.run(writer.sees, str(folder.path), folder.token)
        if blind := [worker for worker, sees in seen.items() if not sees]:
            folder.release()
            shown = ", ".join(blind[:_SHOWN]) + (" ..." if len(blind) > _SHOWN else "")
            raise ConfigError(
                f"{folder.path} is not seen by {len(blind)} of {len(seen)} workers ({shown}): give a folder on a file "
                "system that all nodes share"
            )
        return folder

    def _begin(
        self,
        client: Client,
        name: str,
        manifest: Manifest,
        keys: dict[Any, Any],
        outputs: Mapping[Any, int],
        options: Mapping[str, Any],
    ) -> list[Future]:
        """Load what is in the folder and not on the cluster, and return it; have the workers write the rest."""
        is_new = self._plugins.get(name) != manifest.run
        restored = {} if is_new else self._restored[name]
        # a key stays in futures until the client's loop has released it, and has references after a restart
        live = {key for key in keys.values() if key in client.futures and client.refcount.get(key)}
        others = {part: key for part, key in keys.items() if key not in restored and key not in live}
        tasks, futures = self._load(client, name, manifest, others, options)
        self._restored[name] = restored | tasks
        if is_new:
            self._stop(name)
            client.register_plugin(FinishedChunks())
            plugin = CheckpointPlugin(str(self._folder.path), manifest.run, outputs)
            client.register_plugin(plugin, name=self._plugin(name))
            self._plugins[name] = manifest.run
        return futures

    def _load(
        self, client: Client, name: str, manifest: Manifest, keys: dict[Any, Any], options: Mapping[str, Any]
    ) -> tuple[dict[Any, Task], list[Future]]:
        """Load the chunks that are in the folder; return the tasks of those that are whole, and their futures."""
        index = self._folder.index
        index.refresh()
        chunks = [chunk for part in keys if (chunk := Chunk(manifest.run, part)) in index.chunks]
        chunks.sort(key=lambda chunk: index.chunks[chunk])
        tasks = {keys[chunk.part]: self._load_task(keys[chunk.part], chunk) for chunk in chunks}
        futures = dict(zip(tasks, client.get(tasks, list(tasks), sync=False, **options), strict=True))
        with client.as_current():
            wait(list(futures.values()))
        errors = {key: future.exception() for key, future in futures.items() if future.status == "error"}
        damaged = [key for key, error in errors.items() if isinstance(error, CheckpointError | OSError)]
        if damaged:
            places = [index.chunks[chunk] for chunk in chunks if keys[chunk.part] in damaged]
            parts, files = ", ".join(map(str, damaged[:_SHOWN])), ", ".join(sorted({p.segment for p in places}))
            logger.warning(
                "%r has %s, computed again: %s (in %s)", name, counted(len(damaged), "damaged chunk"), parts, files
            )
        for segment, offset in index.damage.items():
            logger.warning("%s is damaged at byte %d: the chunk there is computed again", segment, offset)
        for key in damaged:
            del tasks[key]
            futures.pop(key).release()
        client.sync(asyncio.sleep, 0)  # the scheduler forgets these keys before they come with other tasks
        return tasks, list(futures.values())

    def _load_task(self, key: Any, chunk: Chunk) -> Task:
        place = self._folder.index.chunks[chunk]
        return Task(key, values.load, str(self._folder.path), tuple(chunk), tuple(place))

    def _manifest(self, name: str) -> Manifest:
        is_folder = stat.S_ISDIR(private.mode_of(self._folder.path))
        if is_folder and (manifest := self._folder.manifest(name)):
            if manifest.format != FORMAT:
                raise CheckpointError(
                    f"{name!r} has format {manifest.format}, and this hpcgpu reads {FORMAT}: run its script again"
                )
            return manifest
        if not is_folder:
            raise ConfigError(f"there is no folder {self._folder.path}")
        raise ConfigError(f"{self._folder.path} has no {name!r}; it has: {', '.join(self.names) or 'none'}")

    def _plugin(self, name: str) -> str:
        return f"hpcgpu-checkpoint {self._folder.path} {name}"

    def _stop(self, name: str) -> None:
        if run := self._plugins.pop(name, None):
            self._client().unregister_worker_plugin(self._plugin(name))
            self._client().run_on_scheduler(forget, run)

    def _statuses(self, question: Any, *arguments: Any) -> list[writer.Status]:
        answers = self._client().run(question, str(self._folder.path), *arguments, on_error="return")
        return [answer for answer in answers.values() if isinstance(answer, writer.Status)]

    def _poll(self, batch: str, job_id: str) -> JobState:
        statuses = self._client().sync(ask, get(batch), [job_id])
        return statuses[job_id].state if job_id in statuses else JobState.ENDED


def _is_frame(collection: Any) -> bool:
    return hasattr(type(collection), "expr")


def _graph(collections: Sequence[Any], keys: Sequence[Any], restored: Mapping[Any, Task]) -> HighLevelGraph:
    """Return the tasks of collections, optimized together as client.persist does, with those that load."""
    tasks: dict[Any, Any] = {}
    annotations: dict[Any, dict[str, Any]] = {}
    for are_frames in (True, False):  # dask warns when they are optimized together
        if group := [each for each in collections if _is_frame(each) is are_frames]:
            expression = collections_to_expr(group).optimize()
            tasks |= expression.__dask_graph__()
            for name, by_key in expression.__dask_annotations__().items():
                for key, value in by_key.items():
                    annotations.setdefault(key, {})[name] = value
    graph = cull(convert_legacy_graph({**tasks, **restored}), keys)
    layers: dict[str, MaterializedLayer] = {}
    for key, task in graph.items():
        notes = {} if key in restored else annotations.get(key, {})
        layer = layers.setdefault(repr(notes), MaterializedLayer({}, annotations=notes))
        layer.mapping[key] = task
    return HighLevelGraph(layers, {name: set() for name in layers})


def _template(nest: Any, collections: Sequence[Any]) -> str:
    """Return the nest of collections without their data and graphs as text, for :meth:`Checkpoint.load`."""
    bare = [rebuilt(each, dict.fromkeys(keys_of([each]))) for each in collections]
    return base64.b64encode(zlib.compress(dumps(filled(nest, iter(bare))))).decode()
