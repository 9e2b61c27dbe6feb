"""Things that happen beside a test, and waiting for what it is about."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

import pytest


class Said:
    """What has been printed so far."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys, self._text = capsys, ""

    @property
    def text(self) -> str:
        more = self._capsys.readouterr()
        self._text += more.out + more.err
        return self._text


def aside(call: Callable[[], object]) -> Future:
    """Have something done beside the test; a thread of a pool would be waited for, also where the test has failed."""
    done: Future = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as e:
            done.set_exception(e)

    threading.Thread(target=run, daemon=True).start()
    return done


def until(condition: Callable[[], object], while_: Future | None = None) -> None:
    while not condition():
        if while_ is not None and while_.done():
            while_.result()
        time.sleep(0.05)
