"""The ranks of a cluster on this machine, whose start is cancelled."""

import asyncio
import contextlib
import threading
from pathlib import Path

import leaks
import pytest

from hpcgpu.deploy.cluster.local_run import LocalRun
from hpcgpu.model import Settings


@pytest.mark.parametrize("turns", range(8))
def test_ranks_whose_start_is_cancelled_are_ended(turns: int, tmp_path: Path) -> None:
    class Sleeping(LocalRun):
        def _plan(self, document: object) -> object:
            self._log = tmp_path / "log"
            planned.set()
            return ("sleep", "60"), {"PATH": "/usr/bin:/bin"}, self._log.open("wb")

    class View:
        def scheduler(self) -> None:
            return None

    async def main() -> None:
        ranks = Sleeping(Settings(), {})
        starting = asyncio.create_task(ranks.start(tmp_path, View()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        planned.wait()
        [await asyncio.sleep(0) for _ in range(turns)]
        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await starting
        await ranks.end()

    planned = threading.Event()
    with leaks.nothing_left():
        asyncio.run(main())
