from __future__ import annotations

import threading

import pytest
from waiting import logged, scaled

from hpcgpu.model.job import Backoff
from hpcgpu.supervise import ThreadLoop

SOON = Backoff(first_s=0.001, longest_s=0.01)


@pytest.mark.parametrize("error", [OSError("full"), SystemExit(3), MemoryError()], ids=repr)
def test_a_round_that_raises_is_said_once_and_the_next_one_comes(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    raises, pauses = [error, error, None], list[float]()

    def work() -> bool:
        if now := raises.pop(0):
            raise now
        return True

    loop = ThreadLoop(work, "the mover", pause=pauses.append, backoff=SOON)
    loop.join(scaled(20))
    assert not loop.is_alive()
    assert raises == []
    assert pauses == [0.001, 0.002]
    (record,) = logged(caplog)
    assert record.getMessage().startswith("the mover failed, and goes on in 0.001 s: " + type(error).__name__)
    assert record.exc_info


def test_joining_it_in_its_own_thread_returns() -> None:
    joined = threading.Event()
    ready = threading.Event()

    def work() -> bool:
        ready.wait(scaled(20))
        loop.join(scaled(20))
        joined.set()
        return True

    loop = ThreadLoop(work, "the mover", pause=lambda _: None)
    ready.set()
    assert joined.wait(5)
