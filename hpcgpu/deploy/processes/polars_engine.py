"""DaskEngine of cudf-polars (26.10) in a worker: it keeps the worker's binding, and stays off the event loop."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import logging
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import wrapt
from distributed.utils import has_arg

from hpcgpu.errors import LaunchError
from hpcgpu.model import WorkerSpec

logger = logging.getLogger("distributed.worker")
_ENGINE = "cudf_polars.engine"
# One thread: what the engine makes must be shut down by the thread that made it (engine/dask.py, _reset_worker).
_thread = ThreadPoolExecutor(1, thread_name_prefix="cudf-polars")


def keep_binding(spec: WorkerSpec) -> None:
    """Have the engine leave this process as it is bound, from its import on; without a GPU it is refused.

    The engine binds each process of a node to the cores of physical GPU 0 if CUDA_VISIBLE_DEVICES has UUIDs:
    docs/upstream/rapidsmpf-uuids.md.
    """

    def mark(module: Any) -> None:
        if spec.gpu is None:
            module.bind_to_gpu = functools.partial(_refuse, spec.name)
        elif hasattr(module, "_bind_done"):
            module._bind_done = True
        else:
            logger.warning(
                "this version of cudf-polars has no mark for bound processes: pass "
                'engine_options={"hardware_binding": HardwareBindingPolicy(enabled=False)}, or it may bind worker %s '
                "to another GPU's cores",
                spec.name,
            )

    wrapt.register_post_import_hook(mark, f"{_ENGINE}.hardware_binding")


def _refuse(worker: str, policy: object) -> NoReturn:
    raise LaunchError(
        f"worker {worker} has no GPU, and cudf-polars' DaskEngine makes a rank of each worker of a cluster: start a "
        "cluster without cpu_workers for it"
    )


def off_loop(function: bytes) -> bytes:
    """Return a pickled function of Client.run; one of the engine as a coroutine function that runs it in a thread."""
    # A query may take minutes, in which the worker's loop would send no heartbeat and answer no peer.
    return pickle.dumps(functools.partial(_in_thread, function)) if _ENGINE.encode() in function else function


async def _in_thread(function: bytes, *args: Any, dask_worker: Any, **kwargs: Any) -> Any:
    """Run a pickled function in the engine's thread; a coroutine function here."""

    def call() -> Any:
        called = pickle.loads(function)
        more = {"dask_worker": dask_worker} if has_arg(called, "dask_worker") else {}
        return called(*args, **kwargs, **more)

    answer = await asyncio.get_running_loop().run_in_executor(_thread, contextvars.copy_context().run, call)
    return await answer if inspect.isawaitable(answer) else answer
