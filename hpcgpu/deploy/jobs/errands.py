"""What the scheduler is to do about workers, which may take as long as their data."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from hpcgpu.supervise import tasks


class Errands:
    """Requests to the scheduler that nobody waits for; what comes of them is seen by who looks at the workers.

    Parameters
    ----------
    say : callable
        Takes a line for the user: a request that failed.

    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._tasks = say, tasks.Group()

    def send(self, errand: Callable[[Sequence[str]], Awaitable[object]], addresses: Sequence[str]) -> None:
        """Have it done for the workers at these addresses."""
        who = f"workers {', '.join(addresses)}"

        async def run() -> None:
            try:
                await errand(addresses)
            except OSError as e:  # the scheduler is gone for the moment, which is told elsewhere
                self._say(f"{who}: {e}")

        # the scheduler's own errors come as they are
        self._tasks.start(run, f"what the scheduler was to do about {who}", lambda e: self._say(f"{who}: {e!r}"))

    def cancel(self) -> None:
        """Wait for none of them any more."""
        self._tasks.cancel()
