"""The user's object: persist a collection under a name, load it, see how far it is."""

from __future__ import annotations

import base64
import logging
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import dask
from dask._task_spec import Task, convert_legacy_graph, cull
from dask.core import flatten
from distributed import Client, default_client
from distributed.protocol.pickle import dumps

from hpcgpu.batch import get
from hpcgpu.checkpoint import values, writer
from hpcgpu.checkpoint.computation import Computation
from hpcgpu.checkpoint.folder import FORMAT, Folder, Manifest
from hpcgpu.checkpoint.segments import Chunk, Place, is_whole
from hpcgpu.checkpoint.writer import CheckpointPlugin, outputs_of, part_of
from hpcgpu.deploy.jobs.batch_client import ask
from hpcgpu.errors import CheckpointError, ConfigError
from hpcgpu.model import JobState
from hpcgpu.report.table import Bar, Column, Shown, Table
from hpcgpu.supervise import reason_of

logger = logging.getLogger("distributed.hpcgpu")
_COLUMNS = (Column("name", kind="name"), Column("chunks"), Column("size", unit="B", kind="number"), Column("kind"))
_COLOUR = "#3b7dd8"
_BATCH = 64  # chunks that one task verifies
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class NameProgress:
    """How far a name is."""

    name: str
    done: int  # chunks on disk
    count: int  # of all
    nbytes: int
    kind: str


@dataclass(frozen=True, slots=True, repr=False)
class Progress(Shown):
    """How far a checkpoint is, and why it is not further; a table in a notebook and in text.

    Attributes
    ----------
    rows : tuple of NameProgress
        For each name the chunks that are on disk, of all, and their bytes.
    waiting : int
        Finished chunks that are not on disk yet.
    troubles : tuple of str
        Since when, and why, workers cannot write; chunks that cannot be pickled.

    """

    rows: tuple[NameProgress, ...]
    waiting: int = 0
    troubles: tuple[str, ...] = ()

    @property
    def table(self) -> Table:
        """The names, with a bar for each in a notebook."""
        rows = [
            (r.name, Bar(f"{r.done} of {r.count}", _COLOUR, r.done, r.done, r.count), r.nbytes, r.kind)
            for r in self.rows
        ]
        waiting = [f"{self.waiting} finished chunks are to be written"] if self.waiting else []
        return Table(_COLUMNS, rows, notes=(*waiting, *self.troubles))


class Checkpoint:
    """A folder in which finished chunks of collections are kept, so that a script that starts again goes on.

    Works on any Dask cluster whose workers have hpcgpu and see the folder. Workers write in the background. Make it in
    the script, also in a script that starts again; one process at a time may write.

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
        self._folder = Folder(path, trusted=trust_folder)
        self._plugins: dict[str, str] = {}  # the run of each name whose chunks the workers write
        self._restored: dict[str, dict[Any, Task]] = {}  # tasks that load, by name: a key keeps its task
        self._scheduler = ""  # whose workers have these plugins
        self._future_digests: dict[Any, str] = {}  # digests of keys that are futures now

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Checkpoint({str(self._folder.path)!r})"

    @property
    def names(self) -> tuple[str, ...]:
        """The names in the folder."""
        return self._folder.names

    def persist(
        self, collection: Any, name: str, *, overwrite: bool = False, alike: bool = False, **options: Any
    ) -> Any:
        """Start computing a collection, as ``client.persist``; its chunks are written when they are finished.

        Chunks that are in the folder are read, and not computed. So are damaged ones computed again, and named.

        Parameters
        ----------
        collection : a Dask collection
            An array, a frame, a bag or a delayed value.
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
        Dask collection
            Of the same kind, on the cluster.

        Raises
        ------
        ConfigError
            The name stands for another computation; another process writes to the folder; a worker does not see it.

        """
        client = self._client()
        before = self._open(client).manifest(name)
        computation = Computation.of(collection, self._future_digests)
        if before and not overwrite and (texts := before.computation.differences(computation, alike=alike)):
            raise ConfigError(
                f"{name!r} in {self._folder.path} is another computation ({'; '.join(texts)}). Give another name, or "
                "pass overwrite=True: what is there is lost then"
            )
        optimized = _optimized(collection)
        keys = list(flatten([optimized.__dask_keys__()]))
        if before and not before.is_readable:
            logger.warning("%r was written by Python %s: its chunks are computed again", name, before.python)
        if before is None or not before.is_readable or overwrite:
            before = self._folder.write(name, computation, len(keys), _template(optimized, keys))
        outputs = outputs_of(keys)
        if self._plugins.get(name) != before.run:
            self._begin(client, name, before, {part_of(key, outputs): key for key in keys}, outputs)
        graph = dict(optimized.__dask_graph__()) | self._restored[name]
        graph = cull(convert_legacy_graph(graph), keys)
        futures = client.get(graph, keys, sync=False, **options)
        digest = computation.digests[""]
        self._future_digests |= {key: f"{digest} {part_of(key, outputs)}" for key in keys}
        rebuild, arguments = optimized.__dask_postpersist__()
        return rebuild(dict(zip(keys, futures, strict=True)), *arguments)

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
        index.refresh()
        index.check()
        template = values.from_frames([zlib.decompress(base64.b64decode(manifest.template))])
        keys = list(flatten([template.__dask_keys__()]))
        outputs = outputs_of(keys)
        chunks = {key: Chunk(manifest.run, part_of(key, outputs) or ()) for key in keys}
        if missing := sum(chunk not in index.chunks for chunk in chunks.values()):
            raise CheckpointError(
                f"{name!r} in {self._folder.path} has {len(keys) - missing} of {len(keys)} chunks: run its script again"
            )
        graph = {key: self._load_task(key, chunk) for key, chunk in chunks.items()}
        rebuild, arguments = template.__dask_postpersist__()
        return rebuild(graph, *arguments)

    def progress(self) -> Progress:
        """Return how far each name is, and what hinders the workers; reads the folder."""
        rows = progress_of(self._folder)
        statuses = self._statuses(writer.status) if self._plugins else []
        return Progress(rows, sum(status.waiting for status in statuses), _troubles(statuses))

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all finished chunks are on disk; return whether they are: a disk may be full, or the time over."""
        statuses = self._statuses(writer.flush, timeout_s) if self._plugins else []
        waiting, troubles = sum(status.waiting for status in statuses), _troubles(statuses)
        if waiting or troubles:
            logger.warning("the checkpoint in %s lacks %d chunks: %s", self._folder.path, waiting, "; ".join(troubles))
        return not waiting and not troubles

    def remove(self, name: str) -> None:
        """Forget a name; files with chunks of other names stay."""
        self._folder.take(self._poll)
        self._stop(name)
        self._folder.remove(name)

    def close(self) -> None:
        """Write what is finished, and let another process write; the collections stay on the cluster."""
        if not self._folder.is_mine:  # another object of this process goes on with the workers' plugins
            return
        try:
            self.flush()
            for name in tuple(self._plugins):
                self._stop(name)
        except Exception as e:  # the cluster has gone; an error of the script is to be seen, not this one
            logger.warning("the checkpoint in %s could not be flushed: %s", self._folder.path, reason_of(e))
        finally:
            self._folder.release()

    def _client(self) -> Client:
        try:
            client = self._chosen_client or default_client()
        except ValueError as e:
            raise ConfigError("a checkpoint is written by a cluster: make a Client, or pass client=") from e
        if client.asynchronous:
            raise ConfigError("a checkpoint takes no asynchronous client: call it in a thread with another client")
        return client

    def _open(self, client: Client) -> Folder:
        """Become the owner of the folder, which all workers must see."""
        folder = self._folder
        if (
            scheduler := client.scheduler_info(n_workers=0).get("id", "")
        ) != self._scheduler:  # another one after a requeue
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
        self, client: Client, name: str, manifest: Manifest, keys: dict[Any, Any], outputs: Mapping[Any, int]
    ) -> None:
        """Restore what is in the folder, and have the workers write the rest."""
        self._restored[name] = self._restorable(client, name, manifest, keys)
        plugin = CheckpointPlugin(str(self._folder.path), manifest.run, outputs)
        client.register_plugin(plugin, name=self._plugin(name))
        self._plugins[name] = manifest.run

    def _restorable(self, client: Client, name: str, manifest: Manifest, keys: dict[Any, Any]) -> dict[Any, Task]:
        """Return a task for each key whose chunk is in the folder, and whole: the workers read all of them."""
        index = self._folder.index
        index.refresh()
        chunks = [chunk for part in keys if (chunk := Chunk(manifest.run, part)) in index.chunks]
        chunks.sort(key=lambda chunk: index.chunks[chunk])
        batches = [
            [(chunk, index.chunks[chunk]) for chunk in chunks[i : i + _BATCH]] for i in range(0, len(chunks), _BATCH)
        ]
        path = str(self._folder.path)
        answers = client.gather(client.map(verify, batches, folder=path, pure=False, key="hpcgpu-verify"))
        damaged = [Chunk(*chunk) for answer in answers for chunk in answer]
        if damaged:
            parts = ", ".join(str(keys[chunk.part]) for chunk in damaged[:_SHOWN])
            files = ", ".join(sorted({index.chunks[chunk].segment for chunk in damaged}))
            logger.warning(
                "%d chunks of %r are damaged, and computed again: %s (in %s)", len(damaged), name, parts, files
            )
        for segment, offset in index.damage.items():
            logger.warning("%s cannot be read from byte %d on: its later chunks are computed again", segment, offset)
        return {keys[c.part]: self._load_task(keys[c.part], c) for c in chunks if c not in set(damaged)}

    def _load_task(self, key: Any, chunk: Chunk) -> Task:
        place = self._folder.index.chunks[chunk]
        return Task(key, values.load, str(self._folder.path), tuple(chunk), tuple(place))

    def _manifest(self, name: str) -> Manifest:
        if manifest := self._folder.manifest(name):
            if manifest.format != FORMAT:
                raise CheckpointError(f"{name!r} has format {manifest.format}; this hpcgpu reads {FORMAT}")
            return manifest
        raise ConfigError(f"{self._folder.path} has no {name!r}; it has: {', '.join(self.names) or 'none'}")

    def _plugin(self, name: str) -> str:
        return f"hpcgpu-checkpoint {self._folder.path} {name}"

    def _stop(self, name: str) -> None:
        if self._plugins.pop(name, None):
            self._client().unregister_worker_plugin(self._plugin(name))

    def _statuses(self, question: Any, *arguments: Any) -> list[writer.Status]:
        answers = self._client().run(question, str(self._folder.path), *arguments, on_error="return")
        return [answer for answer in answers.values() if isinstance(answer, writer.Status)]

    def _poll(self, batch: str, job_id: str) -> JobState:
        statuses = self._client().sync(ask, get(batch), [job_id])
        return statuses[job_id].state if job_id in statuses else JobState.ENDED


def progress_of(folder: Folder) -> tuple[NameProgress, ...]:
    """Return how far each name of a folder is; reads what came since the last call."""
    folder.index.refresh()
    rows = []
    for name in folder.names:
        if manifest := folder.manifest(name):
            places = [place for chunk, place in folder.index.chunks.items() if chunk.run == manifest.run]
            kind = manifest.computation.facts["type"].rpartition(".")[2]
            rows.append(NameProgress(name, len(places), manifest.count, sum(p.nbytes for p in places), kind))
    return tuple(rows)


def verify(batch: Sequence[tuple[Any, Any]], folder: str) -> list[Any]:
    """Return the chunks that are not as they were written; a task."""
    return [chunk for chunk, place in batch if not is_whole(Path(folder), Chunk(*chunk), Place(*place))]


def _optimized(collection: Any) -> Any:
    """Optimize a collection, as client.persist does, before its chunks have tasks that load."""
    if hasattr(type(collection), "expr"):  # dask.optimize gives a frame with other values (dask 2026.8.0)
        return collection.optimize()
    return dask.optimize(collection)[0]


def _template(collection: Any, keys: Sequence[Any]) -> str:
    """Return the collection without its data and graph as text, for :meth:`Checkpoint.load`."""
    rebuild, arguments = collection.__dask_postpersist__()
    return base64.b64encode(zlib.compress(dumps(rebuild(dict.fromkeys(keys), *arguments)))).decode()


def _troubles(statuses: Sequence[writer.Status]) -> tuple[str, ...]:
    """Return each trouble of the workers once."""
    troubles = dict.fromkeys(status.trouble for status in statuses if status.trouble)
    unsaved = {key: why for status in statuses for key, why in status.unsaved.items()}
    shown = [f"{key} is not saved: {why}" for key, why in list(unsaved.items())[:_SHOWN]]
    more = [f"{len(unsaved) - _SHOWN} more are not saved"] if len(unsaved) > _SHOWN else []
    return (*troubles, *shown, *more)
