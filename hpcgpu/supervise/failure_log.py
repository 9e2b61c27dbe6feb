"""Count the failures of repeated work, and log each once."""

from __future__ import annotations

import contextlib
import logging
import time

from hpcgpu.errors import HpcGpuError, message_of
from hpcgpu.model.command import Backoff

logger = logging.getLogger("distributed.hpcgpu")
# Waiting callers get an error only after three failures in a row.
_TROUBLE = 3


class FailureLog:
    """The failures of a piece of repeated work, named in messages: ``"the loop that keeps this cluster's jobs"``."""

    def __init__(self, name: str, backoff: Backoff) -> None:
        self._name, self._backoff = name, backoff
        self.error: BaseException | None = None  # of the last round; None: it succeeded

    @property
    def trouble(self) -> str:
        """A message for callers that wait for the work's results; "" until it has failed a few times in a row."""
        if self.error is None or self._backoff.failures < _TROUBLE:
            return ""
        return f"{self._name} has failed {self._backoff.failures} times in a row: {reason_of(self.error)}"

    def failed(self, error: BaseException) -> float:
        """Log the exception of a round, each reason once; return the seconds until the next round."""
        self.error, self._backoff = error, self._backoff.failed(_kind(error), time.monotonic())
        if self._backoff.is_new:
            with contextlib.suppress(Exception):  # a log filter may raise, and the next round must come
                text = f"{self._name} failed, and goes on in {self._backoff.wait_s:.3g} s: {reason_of(error)}"
                logger.warning("%s", text, exc_info=error)
        return self._backoff.wait_s

    def went_well(self) -> bool:
        """Record a success; return True if the round before failed."""
        if self.error is None:
            return False
        self.error = None
        with contextlib.suppress(Exception):
            logger.info("%s works again", self._name)
        return True


def _kind(error: BaseException) -> str:
    """Return a key that is the same for the same fault: a message may hold a descriptor, an address, a time."""
    if isinstance(error, HpcGpuError):
        return str(error)
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    where = f"{at.tb_frame.f_code.co_filename}:{at.tb_lineno}" if at else ""
    return f"{type(error).__name__} {getattr(error, 'errno', None)} {where}"


def reason_of(error: BaseException) -> str:
    """Return an error in one line: its message if it is hpcgpu's, else also its type."""
    text = message_of(error)
    return text if isinstance(error, HpcGpuError) else f"{type(error).__name__}: {text}".removesuffix(": ")
