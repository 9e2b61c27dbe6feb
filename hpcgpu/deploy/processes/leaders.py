"""The leaders of the run's nodes, as the scheduler sees them: their connections."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Any

from distributed.core import CommClosedError

from hpcgpu.deploy.processes.control import Control

_DISMISS_S = 4.0
_LOST = "its leader is lost, and its workers with it"
# Another rank of the node, where there is one, leads it within seconds.
_TAKEOVER_S = 30.0


class LeaderConnections:
    """Hold the leaders' connections, and tell rank 0 which are lost, and how many have workers."""

    def __init__(self, control: Control, *, grows: bool = False, takeover_s: float = _TAKEOVER_S) -> None:
        self._control, self._grows = control, grows  # more leaders may come, whatever happens to these
        self._takeover_s = takeover_s
        self._notes: dict[Any, tuple[str, Sequence[str]]] = {}  # node and notes, by connection
        self._failed: list[tuple[str, str]] = []  # node and reason of each worker that did not start
        self._lost: dict[str, tuple[int, float]] = {}  # how many workers of a node without a leader, and since when
        self.late: list[tuple[str, str]] = []  # rank 0's note about workers that have not come
        self._working: set[Any] = set()  # connections of leaders with workers, running or being restarted
        self._died: list[str] = []
        self._had_workers = False
        self._left = asyncio.Event()
        self._dismissed = False

    @property
    def absent(self) -> list[tuple[str, str]]:
        """Node and reason of each worker that did not start, or is lost, and does not come again."""
        before_s = time.monotonic() - self._takeover_s
        lost = [(node, _LOST) for node, (count, at_s) in self._lost.items() if at_s <= before_s for _ in range(count)]
        return self._failed + lost

    def none_come(self) -> bool:
        """Return True if there were workers, and no more will come."""
        return self._had_workers and not self._grows and not self._working

    def notes(self) -> list[tuple[str, str]]:
        """Return the leaders' notes about their nodes: node and text (``hpcgpu_notes``)."""
        notes = [(node, text) for node, texts in self._notes.values() for text in texts]
        return [*notes, *self.late]

    async def hold(self, comm: Any, node: str = "", notes: Sequence[str] = (), workers: int = 0) -> None:
        """Hold a leader's connection (``hpcgpu_watch``) until it ends."""
        self._notes[comm] = (node, notes)
        self._lost.pop(node, None)
        if workers:
            self._had_workers = True
            self._working.add(comm)
            self._tell()
        lost = True
        try:
            with contextlib.suppress(CommClosedError):
                await comm.write("watching")
                while (message := await comm.read()) != "bye":
                    if "absent" in message:
                        self._failed += [(node, text) for text in message["absent"]]
                        self._control.send("absent", texts=[text for _, text in self._failed])
                        workers -= len(message["absent"])
                        continue
                    self._working.discard(comm)  # all of its workers have ended for good
                    self._died += [message["died"]] if message["died"] else []
                    self._tell()
                lost = False
        finally:
            del self._notes[comm]
            self._left.set()
            if lost and not self._dismissed:
                self._control.send("leader_lost", node=node)
                if comm in self._working and not self._grows:
                    self._lost[node] = workers, time.monotonic()
                self._died += [f"node {node} lost its leader"] if comm in self._working else []
            self._working.discard(comm)
            self._tell()

    def _tell(self) -> None:
        if self._had_workers and not self._grows and not self._dismissed:
            self._control.send("leaders", working=len(self._working), died="; ".join(self._died))

    async def tell(self, message: Any) -> None:
        """Send the leaders a message."""
        for comm in tuple(self._notes):
            with contextlib.suppress(CommClosedError):
                await comm.write(message)

    async def dismiss(self) -> None:
        """Tell the leaders that the run ends, and wait until they have ended their workers."""
        self._dismissed = True  # before the scheduler closes: a nanny without one takes 1.6 s to close
        await self.tell("end")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DISMISS_S):
                while self._notes:
                    self._left.clear()
                    await self._left.wait()
