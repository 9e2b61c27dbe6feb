"""A task's last step before users' code.

distributed leaves its own frames out of tracebacks and profiles by the paths of their files: those that contain
``distributed/worker`` or end with ``distributed/worker.py`` (2026.8.0: utils.get_traceback, Worker.trigger_profile).
This module is named for that: users see the same frames as without hpcgpu.
"""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Mapping
from typing import Any

from hpcgpu.spill.store.buffer import GpuSpillBuffer
from hpcgpu.spill.store.handles import Handle


class Unspill:
    """A task that unspills its arguments in the thread in which it runs."""

    def __init__(self, spec: Any, store: GpuSpillBuffer) -> None:  # distributed has no types
        self.spec, self.store = spec, store

    def __call__(self, data: Mapping[Any, Any]) -> Any:
        """Unspill the arguments and run the task; called by distributed in place of the task."""
        if self.spec.is_coro:
            return self._call_coroutine(data)
        with self.store.using(data):
            return self.spec(_resolved(data))

    async def _call_coroutine(self, data: Mapping[Any, Any]) -> Any:
        with self.store.using(data):
            return await self.spec(await asyncio.to_thread(_resolved, data))

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        # a process of a user's executor has no store: it gets the task itself, with values
        return operator.getitem, ((self.spec,), 0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.spec, name)

    def __repr__(self) -> str:
        return repr(self.spec)


def _resolved(data: Mapping[Any, Any]) -> dict[Any, Any]:
    return {k: v.resolve() if type(v) is Handle else v for k, v in data.items()}
