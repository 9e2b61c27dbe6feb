"""What lies in which tier, how much of it, and in which order it was used. Called under the store's lock."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from hpcgpu.spill.devices import Device
from hpcgpu.spill.policy import Candidate, victims_of
from hpcgpu.spill.unit import TIERS, Buffer, Unit

# Moving less frees nothing that matters: numbers, and the skeletons of values whose arrays are on the device.
_SMALL_BYTES = 1024
_Order = OrderedDict[int, Unit]


class Ledger:
    """All units by tier, longest unused first, and the clean copies that lie in host memory.

    OrderedDict, since a plain dict is quadratic at its old end (facts: 50,000 times the first of a dict 1.08 s, of an
    OrderedDict 0.013 s).
    """

    def __init__(self) -> None:
        # clean ones, of which a copy lies below, and the others
        self._orders: dict[str, tuple[_Order, _Order]] = {tier: (OrderedDict(), OrderedDict()) for tier in TIERS}
        self._copies: _Order = OrderedDict()
        self._kept: dict[int, int] = {}  # bytes of what lies in its tier for good
        self.bytes = dict.fromkeys(TIERS, 0)
        self.spilled_bytes = self.copy_bytes = 0
        self._clock = 0

    def add(self, unit: Unit) -> None:
        """Count a unit from now on."""
        unit.counted = True
        self._count(unit, unit.nbytes)
        if unit.nbytes >= _SMALL_BYTES:
            unit.order = self._orders[unit.tier][not _is_clean(unit)]
            unit.order[unit.name] = unit
            if unit.tier == "device" and "host" in unit.copies():
                self._copies[unit.name] = unit
                self.copy_bytes += unit.nbytes

    def touch(self, units: Iterable[Unit]) -> None:
        """Note that units are used."""
        self._clock += 1
        for unit in units:
            unit.age = self._clock
            if unit.order is not None:
                unit.order.move_to_end(unit.name)
                if unit.name in self._copies:
                    self._copies.move_to_end(unit.name)

    def postpone(self, unit: Unit) -> None:
        """Try others first next time."""
        if unit.order is not None:
            unit.order.move_to_end(unit.name)

    def forget(self, unit: Unit) -> None:
        """Count a unit no more."""
        if unit.counted:
            unit.counted = False
            self._count(unit, -unit.nbytes)
            self._unlist(unit)
            self._kept.pop(unit.name, None)
            self._forget_copy(unit)

    def keep(self, unit: Unit) -> None:
        """Let a unit lie in its tier for good."""
        if unit.counted:
            self._unlist(unit)
            self._kept[unit.name] = unit.nbytes

    @property
    def kept(self) -> tuple[int, int]:
        """Number and bytes of the units that lie in their tier for good."""
        return len(self._kept), sum(self._kept.values())

    def _unlist(self, unit: Unit) -> None:
        if unit.order is not None:
            del unit.order[unit.name]
            unit.order = None

    def moved(self, unit: Unit, tier: str) -> None:
        """Note where a unit lies now."""
        counted = unit.counted  # if not, its last key was deleted meanwhile
        self.forget(unit)
        unit.tier = tier
        unit.nbytes = unit.measured()
        if counted:
            self.add(unit)

    def is_movable(self, unit: Unit, tier: str) -> bool:
        """Tell whether a unit is still there and may go."""
        return not unit.pins and unit.tier == tier and unit.order is not None

    def choose(self, tier: str, need_bytes: int, below_bytes: float, device: Device | None = None) -> list[Unit]:
        """Return what is to go from a tier, or from one device, of what is smaller than ``below_bytes``.

        The policy looks at no more than it needs: a million candidates would hold the lock long.
        """
        groups = [_candidates(order, below_bytes, device) for order in self._orders[tier]]
        clean, others = self._orders[tier]
        return [clean.get(c.name) or others[c.name] for c in victims_of(groups, need_bytes)]

    def drop_copies(self, need_bytes: int) -> int:
        """Give up clean copies in host memory, the longest unused first; return the bytes."""
        dropped = 0
        for unit in list(self._copies.values()):
            if dropped >= need_bytes:
                break
            if unit.lock.acquire(blocking=False):  # else it moves just now, perhaps by this copy
                try:
                    unit.drop_copy("host")
                    self._forget_copy(unit)
                finally:
                    unit.lock.release()
                dropped += unit.nbytes
        return dropped

    def _forget_copy(self, unit: Unit) -> None:
        if self._copies.pop(unit.name, None) is not None:
            self.copy_bytes -= unit.nbytes

    def _count(self, unit: Unit, nbytes: int) -> None:
        self.bytes[unit.tier] += nbytes
        if unit.tier != unit.top:
            self.spilled_bytes += nbytes


def _is_clean(unit: Unit) -> bool:
    return not unit.volatile and bool(unit.copies())


def _candidates(order: _Order, below_bytes: float, device: Device | None) -> Iterator[Candidate]:
    """Yield what may go, longest unused first."""
    for unit in order.values():
        here = device is None or (isinstance(unit, Buffer) and unit.device is device)
        if here and unit.nbytes < below_bytes:
            needed = 2 if unit.running else 1 if unit.waiting else 0
            soonest = min(unit.waiting.values()) if unit.waiting else ()
            yield Candidate(unit.name, unit.age, unit.nbytes, unit.pins > 0, needed, _is_clean(unit), soonest)
