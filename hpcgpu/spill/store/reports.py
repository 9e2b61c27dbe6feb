"""The store's lines in the worker's log about tiers that stay above their limits and of values that cannot move."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection

from hpcgpu.errors import message_of
from hpcgpu.spill.state.units import DISK, HOST, Say
from hpcgpu.spill.values.entry import ABSENT
from hpcgpu.spill.values.unit import Content
from hpcgpu.units import format_bytes

logger = logging.getLogger("distributed.worker.memory")

TIER_NAMES = {DISK: "disk", HOST: "host"}
# A tier may be above its limit and below it by turns, each second, as long as copies fail: that is said once a minute.
_AGAIN_S = 60.0


class Reports:
    """Carries out the instruction to say something.

    Errors are logged as text: distributed's DequeHandler (2026.8.0) keeps 10,000 records, and an error keeps the arrays
    of its frames.

    Thread-safe: Executor makes it, and calls it without the store's lock in the thread that carries the instruction
    out. Two threads may come in another order than the machine has told them: ``stays`` has the present state.

    Attributes
    ----------
    trouble : dict of int to str
        By tier, why it stays above its limit, in one line.

    """

    def __init__(self, stays: Collection[int]) -> None:
        self._stays = stays
        self.trouble: dict[int, str] = {}
        self._said: dict[int, tuple[str, float]] = {}  # by tier, what was logged last, and when
        self._unanswered: set[int] = set()  # tiers of which was logged that they stay, and not that they do no more
        self._immovable_kinds: set[str] = set()

    def say(self, say: Say) -> None:
        """Log it, unless it is known."""
        if say.what == "immovable":
            self._say_immovable(say)
        elif say.what == "stays":
            self._say_stays(say)
        elif say.tier not in self._stays:
            self.trouble.pop(say.tier, None)
            if say.tier in self._unanswered:
                self._unanswered.discard(say.tier)
                logger.info("the %s tier is below its limit again", tier_name(say.tier))

    def _say_immovable(self, say: Say) -> None:
        kind = getattr(say.error, "kind", "value")
        if say.error is not None and kind not in self._immovable_kinds:
            self._immovable_kinds.add(kind)
            what = "pickled; such values stay in memory" if say.tier == HOST else "moved; such arrays stay there"
            logger.warning("a %s cannot be %s: %s", kind, what, message_of(say.error))

    def _say_stays(self, say: Say) -> None:
        why = "as much lies on disk as may (max_spill)"
        if (error := say.error) is not None:
            why = message_of(error) or type(error).__name__
        if say.tier in self._stays:
            self.trouble[say.tier] = why
        before, said_s = self._said.get(say.tier, ("", 0.0))
        if why == before and time.monotonic() - said_s < _AGAIN_S:
            return
        self._said[say.tier] = why, time.monotonic()
        self._unanswered.add(say.tier)
        logger.warning(
            "%s stay in the %s tier, since they cannot be moved down: %s",
            format_bytes(say.nbytes),
            tier_name(say.tier),
            why,
        )


def tier_name(tier: int) -> str:
    """Return what people call a tier."""
    return TIER_NAMES.get(tier, "device")


def called(unit: Content) -> str:
    """Return how messages call a lost unit: by the keys of the values that it is a part of."""
    keys = [repr(entry.key) for entry in tuple(unit.entries) if entry.key is not ABSENT]
    kind = unit.contents[0].kind_of(0).__name__ if unit.contents else "value"
    return f"the value of {', '.join(keys) or f'a {kind}'}"
