"""Forks for deploy: the zygote's requests and reports, on an asyncio loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from hpcgpu.agent.zygote import Zygote
from hpcgpu.supervise import tasks

if TYPE_CHECKING:
    from hpcgpu.deploy.processes.control import Child


class ZygoteSpawner:
    """What ``deploy.processes.control.Spawner`` asks for.

    Parameters
    ----------
    zygote : Zygote
        The image.
    outputs : mapping of int to (int, int)
        stdout and stderr of each rank of the node; this process's own where a rank is not in it.
    on_death : callable
        Called when the zygote, and with it every process that it forked, is gone.

    """

    def __init__(self, zygote: Zygote, outputs: Mapping[int, tuple[int, int]], on_death: Callable[[], None]) -> None:
        self.zygote, self._outputs, self._on_death = zygote, outputs, on_death
        self._children: dict[int, asyncio.Future[int]] = {}
        self._loop = asyncio.get_running_loop()
        self._read_exits = tasks.guarded(self._look, "reading the zygote's reports", lambda _: self._give_up())
        self._loop.add_reader(zygote.sock, self._read_exits)

    def spawn(self, entry: str, spec: object, rank: int) -> Child:
        """Fork a child that calls ``entry`` with ``(spec, control socket)``, on the output of ``rank``."""
        ours, theirs = socket.socketpair()
        with theirs:
            pid = self.zygote.spawn(entry, spec, (theirs.fileno(), *self._outputs.get(rank, (1, 2))))
        return self.adopt(pid, ours)

    def kill(self) -> None:
        """End the zygote, which does not do its part; its end is noticed as any other."""
        self.zygote.kill()

    def adopt(self, pid: int, control: socket.socket) -> Child:
        """Report the end of a child that was forked before this spawner was there."""
        from hpcgpu.deploy.processes.control import Child

        exited: asyncio.Future[int] = self._loop.create_future()
        self._children[pid] = exited
        self._loop.call_soon(self._read_exits)  # it may have ended while the pid was on its way
        return Child(pid, control, exited)

    def _look(self) -> None:
        try:
            for exit_ in self.zygote.exits():
                if (exited := self._children.pop(exit_.pid, None)) and not exited.done():
                    exited.set_result(exit_.code)
        except (EOFError, ConnectionError):
            self._give_up()

    def _give_up(self) -> None:
        """Take the zygote for dead, also when its reports cannot be read: nobody would know of any end."""
        self._loop.remove_reader(self.zygote.sock)
        for exited in self._children.values():
            if not exited.done():
                exited.set_result(-9)
        self._children.clear()
        self._on_death()
