"""Followers that die while their leader lives: their workers are retired, and the data moves to others."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Sequence

from hpcgpu.agent.follower import Guest
from hpcgpu.errors import HpcGpuError
from hpcgpu.host import log
from hpcgpu.supervise import tasks
from hpcgpu.supervise.rounds import reason_of

# A signal to a whole job reaches the followers, who die at once, and their leader, who ends the run.
_TOGETHER_S = 0.5


class Attendance:
    """Watches the followers' connections, which end with their processes.

    Parameters
    ----------
    guests : sequence of Guest
        The followers.
    workers : callable
        Returns the names of the workers of a rank.
    retire : callable
        Has the scheduler retire the workers with these names; returns the names of those that went.
    ended : asyncio.Event
        The run ends: from then on nobody's death counts.
    node : str
        To say where it happened.

    """

    def __init__(
        self,
        guests: Sequence[Guest],
        workers: Callable[[int], list[str]],
        retire: Callable[[list[str]], Awaitable[list[str]]],
        ended: asyncio.Event,
        node: str,
    ) -> None:
        self._guests = {g.rank: g for g in guests}
        self._workers, self._retire, self._ended, self._node = workers, retire, ended, node
        self._tasks = tasks.Group()
        self._loop = asyncio.get_running_loop()
        for guest in guests:
            self._loop.add_reader(
                guest.sock, tasks.guarded(self._look, f"the look at rank {guest.rank}", tasks.say_only), guest
            )

    def _look(self, guest: Guest) -> None:
        self._loop.remove_reader(guest.sock)  # followers say nothing once they are there: this is the end
        del self._guests[guest.rank]
        lose = functools.partial(self._lose, guest.rank)
        self._tasks.start(lose, f"the end of rank {guest.rank}", functools.partial(self._failed, guest.rank))

    def _failed(self, rank: int, error: BaseException) -> None:
        names = self._workers(rank)
        self._say(
            f"rank {rank} died; {_its(names) if names else 'its worker'} could not be retired: {reason_of(error)}"
        )

    async def _lose(self, rank: int) -> None:
        try:
            await asyncio.wait_for(self._ended.wait(), _TOGETHER_S)
        except TimeoutError:
            self._say(f"rank {rank} died; {await self._retired(rank)}")

    async def _retired(self, rank: int) -> str:
        """Retire the workers of a rank; return what became of them."""
        names = self._workers(rank)
        if not names:
            return "it had no worker"
        try:
            gone = await self._retire(names)
        except (OSError, HpcGpuError) as e:
            return f"{_its(names)} could not be retired: {e}"
        if kept := [n for n in names if n not in gone]:
            return f"{_its(kept)} stay{'s' if len(kept) == 1 else ''}: there is no other to take the data and the tasks"
        for guest in self._guests.values():
            guest.tell("lost", rank=rank)
        return f"{_its(names)} {'was' if len(names) == 1 else 'were'} retired"

    def _say(self, text: str) -> None:
        log.say_of(self._node, (text,))

    def close(self) -> None:
        """Watch no more."""
        for guest in self._guests.values():
            self._loop.remove_reader(guest.sock)
        self._tasks.cancel()


def _its(names: Sequence[str]) -> str:
    return f"its worker{'s' if len(names) > 1 else ''} {', '.join(names)}"
