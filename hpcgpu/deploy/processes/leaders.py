"""The leaders at the scheduler: which of them live, and which have workers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

from distributed.core import CommClosedError

from hpcgpu.deploy.processes.control import Control
from hpcgpu.supervise import tasks

_DISMISS_S = 4.0
# Another rank of a dead leader's node has this long to lead in its place.
_SUCCESSOR_S = 10.0


class Watchers:
    """The leaders' connections: an end of file, at either end, says that the other is gone.

    Parameters
    ----------
    control : Control
        To rank 0, which is told of leaders that are lost, and of how many have workers.
    grows : bool
        More leaders may come, whatever becomes of these.
    successor_s : float
        How long another leader may take to come in the place of one that is lost.

    """

    def __init__(self, control: Control, *, grows: bool = False, successor_s: float = _SUCCESSOR_S) -> None:
        self._control, self._grows, self._successor_s = control, grows, successor_s
        self._comms: dict[Any, str] = {}  # of each the place, which a node's leaders have one after another
        self._notes: dict[Any, tuple[str, Sequence[str]]] = {}
        self._working: set[Any] = set()  # those with workers that are there, or started anew
        self._awaited = 0
        self._died: list[str] = []
        self._had_workers = False
        self._left = asyncio.Event()
        self._dismissed = False

    @property
    def none_come(self) -> bool:
        """Whether there were workers, and none will be there again."""
        return self._had_workers and not self._grows and not self._working and not self._awaited

    def notes(self) -> list[tuple[str, str]]:
        """Return node and text of what the leaders say of their nodes (``hpcgpu_notes``)."""
        return [(node, text) for node, said in self._notes.values() for text in said]

    async def serve(
        self,
        comm: Any,  # noqa: ANN401 - distributed has no types
        node: str = "",
        place: str = "",
        notes: Sequence[str] = (),
        workers: int = 0,
    ) -> None:
        """Hold a leader's connection (``hpcgpu_watch``) until it ends."""
        self._comms[comm], self._notes[comm] = place, (node, notes)
        if workers:
            self._had_workers = True
            self._working.add(comm)
            self._tell()
        lost = True
        try:
            with contextlib.suppress(CommClosedError):
                await comm.write("watching")
                while (said := await comm.read()) != "bye":
                    self._end_of_workers(comm, said["died"])
                lost = False
        finally:
            del self._comms[comm], self._notes[comm]
            self._left.set()
            if lost:
                self._await_successor(node, place, had_workers=comm in self._working)
            self._working.discard(comm)
            self._tell()

    def _end_of_workers(self, comm: Any, died: str) -> None:  # noqa: ANN401
        """Know that none of a leader's workers will be there again; ``died``: which did not leave as they should."""
        self._working.discard(comm)
        self._died += [died] if died else []
        self._tell()

    def _await_successor(self, node: str, place: str, *, had_workers: bool) -> None:
        self._awaited += had_workers
        report = tasks.guarded(self._report, "the report of a lost leader", tasks.say_only)
        asyncio.get_running_loop().call_later(self._successor_s, report, node, place, had_workers)

    def _report(self, node: str, place: str, had_workers: bool) -> None:
        self._awaited -= had_workers
        if self._dismissed:
            return
        if place not in self._comms.values():
            self._control.send("leader_lost", node=node)
            self._died += [f"node {node} lost its leader"] if had_workers else []
        self._tell()

    def _tell(self) -> None:
        if self._had_workers and not self._grows and not self._dismissed:
            left = len(self._working) + self._awaited
            self._control.send("leaders", working=left, died="; ".join(self._died))

    async def dismiss(self) -> None:
        """Tell the leaders that the run ends, and wait until they have ended their workers.

        A nanny whose scheduler is gone takes 1.6 s to close.
        """
        self._dismissed = True
        for comm in tuple(self._comms):
            with contextlib.suppress(CommClosedError):
                await comm.write("end")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DISMISS_S):
                while self._comms:
                    self._left.clear()
                    await self._left.wait()
