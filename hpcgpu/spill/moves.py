"""Where everything lies, and every way to move it."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hpcgpu.errors import SpillError
from hpcgpu.spill import pressure
from hpcgpu.spill.devices import Device
from hpcgpu.spill.disk import Disk
from hpcgpu.spill.entry import ABSENT, Entry
from hpcgpu.spill.foresight import Foresight
from hpcgpu.spill.handle import Packed
from hpcgpu.spill.ledger import Ledger
from hpcgpu.spill.limits import bytes_of
from hpcgpu.spill.pickled import ImmovableError
from hpcgpu.spill.unit import TIERS, Buffer, Unit
from hpcgpu.units import format_bytes

logger = logging.getLogger("distributed.worker.memory")

# Moving begins above a limit and goes on to this part of it, so that not every new value sets the mover going.
_LOW = 0.95
# A full disk is not tried again at once.
_PAUSE_S = 1.0
# What was moved may be held for a moment longer by an event or by a task that has just ended.
_FREED_S, _FREED_POLL_S = 1.0, 0.01
# The part of the host tier that goes to disk when distributed asks for memory.
_SQUEEZE = 0.1


@dataclass(slots=True)
class Count:
    """Moves in one direction."""

    nbytes: int = 0
    number: int = 0
    seconds: float = 0.0


class Moves:
    """All units by tier, and every way to move one.

    ``lock`` is the store's: held for bookkeeping, never while bytes are copied. A unit's own lock is held while it
    moves; who holds it may take ``lock``, never the other way round.

    ``host_is_short`` tells whether the kernel has little memory left for this process, for who can ask it: what is
    kept to be used again is given back then.
    """

    def __init__(self, lock: threading.RLock, device_limit: float, host_limit_bytes: int, disk: Disk) -> None:
        self.lock, self.disk = lock, disk
        self._device_limit, self._devices = device_limit, list[Device]()
        self.device_limit_bytes, self.host_limit_bytes = 0, host_limit_bytes
        self.stopped = False
        self.host_is_short: Callable[[], bool] | None = None
        self.rescues = 0
        self.ledger, self.foresight = Ledger(), Foresight()
        self._squeeze_bytes = 0
        self._trouble_in: dict[str, tuple[float, int]] = {}  # until when, and what was too big
        self._immovable: set[str] = set()
        self.counters = {n: Count() for n in ("device_to_host", "host_to_disk", "disk_to_host", "host_to_device")}

    def tiers(self) -> dict[str, int]:
        """Return the bytes in each tier; clean copies of what is in use above are not counted."""
        with self.lock:
            return dict(self.ledger.bytes)

    def watch(self, device: Device) -> None:
        """Make room on a device when an allocation fails there; learn its size."""
        if self._device_limit and device not in self._devices:
            self._devices.append(device)
            self.device_limit_bytes = bytes_of(self._device_limit, device.memory_bytes)
            pressure.join(device, self)

    def close(self) -> None:
        """Leave the devices alone and remove the folder; no move is under way."""
        for device in self._devices:
            pressure.leave(device, self)
        self.disk.close()

    def is_due(self) -> bool:
        """Tell whether there is something to do for the mover."""
        return self.disk.has_waste or self.is_over()

    def is_over(self) -> bool:
        """Tell whether a tier is above its limit."""
        there = self.ledger.bytes
        return (
            0 < self.device_limit_bytes < there["device"]
            or 0 < self.host_limit_bytes < there["host"] + self.ledger.copy_bytes
        )

    def squeeze(self) -> None:
        """Let go of host memory, a part of what is there at a time."""
        with self.lock:
            there = self.ledger.bytes["host"] + self.ledger.copy_bytes + self.idle_bytes
            self._squeeze_bytes = int(there * _SQUEEZE) or there

    @property
    def idle_bytes(self) -> int:
        """Host memory that is kept to be used again."""
        return self.disk.idle_bytes + sum(memory.idle_bytes for memory in self._page_locked())

    def trim(self) -> int:
        """Give that memory back to the system, which takes a moment; return the bytes."""
        return self.disk.trim() + sum(memory.trim() for memory in self._page_locked())

    def _page_locked(self) -> list[Any]:
        """Return what copies from and to the devices go through; a simulated one has nothing of its own."""
        return [device.copies for device in self._devices if hasattr(device, "copies")]

    def relieve(self) -> bool:
        """Move down what is above the limits, else up what is needed next; return whether anything moved."""
        self.disk.empty_bin()
        squeeze, self._squeeze_bytes = self._squeeze_bytes, 0
        if squeeze:
            squeeze -= self.trim()
        elif self.host_is_short and self.idle_bytes and self.host_is_short():
            self.trim()
        moved = self._evict("device", self._need("device"))
        need = max(self._need("host"), squeeze)
        if need > 0:
            with self.lock:
                freed = self.ledger.drop_copies(need)
            moved += freed
            moved += self._evict("host", need - freed)
        if squeeze > 0:
            self.trim()  # what has just gone to disk leaves its buffers
        if moved:
            return True
        with self.lock:
            wanted = self.foresight.wanted()
        return self.fetch(wanted)

    def fetch(self, wanted: list[Unit]) -> bool:
        """Bring up the first of these for which there is room without moving anything else; return whether one was."""
        for unit in wanted:
            if unit.pins or self._over(unit.top, _LOW) + unit.nbytes > 0:
                continue  # whoever pins it brings it up
            try:
                self.bring_up(unit)
            except (OSError, MemoryError, SpillError) as e:
                logger.debug("fetching ahead failed, the task that needs it will say so: %s", e)
                return False
            return True
        return False

    def evict(self, device: Device, need_bytes: int) -> bool:
        """Move from a device what can be, or wait for a thread that does so; return whether anything moved."""
        with self.lock:
            busy = [u for u in self.ledger.choose("device", need_bytes, math.inf, device) if u.lock.locked()]
        moved = self._evict("device", need_bytes, device) > 0 or any(u.wait(_FREED_S) for u in busy)
        self.rescues += moved
        return moved

    def make_room(self, device: Device, need_bytes: int) -> bool:
        """Move from a device what can be, for an allocation that has failed; in the thread that allocates."""
        # even where used_bytes says that there is room: fragments and other processes are not in it
        self._evict("device", need_bytes, device)
        end = time.monotonic() + _FREED_S
        while (over := device.used_bytes + need_bytes - device.memory_bytes) > 0:
            if not self._evict("device", over, device):
                if time.monotonic() > end:
                    return False
                time.sleep(_FREED_POLL_S)
        self.rescues += 1
        return True

    def bring_up(self, unit: Unit) -> None:
        """Move a unit to where its value can be used; wait for a move of it that is under way."""
        with unit.lock:
            while unit.tier != unit.top:
                below, above = unit.tier, TIERS[TIERS.index(unit.tier) - 1]
                self.counted(f"{below}_to_{above}", unit.up)
                with self.lock:
                    self.ledger.moved(unit, above)

    def packed(self, entry: Entry) -> Packed:
        """Return the bytes of a value that is pinned, for a peer; nothing goes through the device."""
        buffers, hosts, out = list[Unit](), list[tuple[Unit, int]](), []
        for unit, index in dict.fromkeys(entry.places):
            if not isinstance(unit, Buffer):
                self.bring_up(unit)
                hosts.append((unit, index))
            elif unit not in buffers:
                buffers.append(unit)
                with unit.lock:
                    out.append((unit.device, *unit.packed(self.disk)))
        self.bring_up(entry.rest)
        places = [
            (buffers.index(u), i, u.kind_of(i)) if isinstance(u, Buffer) else (None, hosts.index((u, i)), u.kind_of(i))
            for u, i in entry.places
        ]
        return Packed(entry.rest.value, tuple(places), tuple(out), tuple(u.object_at(i) for u, i in hosts))

    def _over(self, tier: str, part: float) -> int:
        limit = self.device_limit_bytes if tier == "device" else self.host_limit_bytes
        there = self.ledger.bytes[tier] + (self.ledger.copy_bytes if tier == "host" else 0)
        return there - int(limit * part) if limit else 0

    def _need(self, tier: str) -> int:
        return self._over(tier, _LOW) if self._over(tier, 1.0) > 0 else 0

    def _smaller_than(self, tier: str) -> float:
        """Return below which size moving down from a tier may work: a disk that is full for a big one has room left."""
        until, nbytes = self._trouble_in.get(tier, (0.0, 0))
        return nbytes if time.monotonic() < until else math.inf

    def _evict(self, tier: str, need_bytes: int, device: Device | None = None) -> int:
        """Move units down, the longest unused first; return the bytes."""
        if need_bytes <= 0:
            return 0
        with self.lock:
            units = self.ledger.choose(tier, need_bytes, self._smaller_than(tier), device)
            chosen = [(unit, unit.age) for unit in units]
        moved = 0
        for unit, age in chosen:
            if unit.nbytes >= self._smaller_than(tier):
                continue
            moved += self._move_down(unit, tier, age)
            if self.stopped:
                break
        return moved

    def _move_down(self, unit: Unit, tier: str, age: int) -> int:
        if not unit.lock.acquire(blocking=False):
            return 0
        try:
            with self.lock:
                # used since it was chosen: user code may be about to write to what it was handed out
                if unit.age != age or not self.ledger.is_movable(unit, tier):
                    return 0
                for entry in unit.entries:
                    if not entry.lazy or unit is entry.rest:
                        entry.value = ABSENT
                for part in (unit.parts or {}).values():
                    part.let_go()
                # from now on nobody who is outside of a task gets the value itself, so that a copy stays what it is
                clean, nbytes = () if unit.volatile else unit.copies(), unit.nbytes
                if clean:
                    unit.let_go()
                    self.ledger.moved(unit, clean[0])
                    return nbytes
            below = TIERS[TIERS.index(tier) + 1]
            try:
                self.counted(f"{tier}_to_{below}", unit.down)
            except ImmovableError as e:
                self._keep(unit, e)
                return 0
            except Exception as e:  # a full disk, or whatever a device's library raises: the unit stays where it is
                self._trouble(unit, tier, e)
                return 0
            with self.lock:
                self.ledger.moved(unit, below)
            if tier in self._trouble_in and self._smaller_than(tier) == math.inf:
                del self._trouble_in[tier]
                logger.info("moving down from the %s tier works again", tier)
            return nbytes
        finally:
            unit.lock.release()

    def _keep(self, unit: Unit, why: ImmovableError) -> None:
        """Let a unit lie in its tier for good."""
        with self.lock:
            self.ledger.keep(unit)
        if why.kind not in self._immovable:
            self._immovable.add(why.kind)
            logger.warning("a %s cannot be pickled; such values stay in memory: %s", why.kind, why)

    def _trouble(self, unit: Unit, tier: str, error: Exception) -> None:
        """Leave a unit where it is; others are tried first next time, and not at once."""
        if tier not in self._trouble_in:
            logger.warning(
                "%s stay in the %s tier, since they cannot be moved down: %s",
                format_bytes(unit.nbytes),
                tier,
                error or repr(error),
            )
        self._trouble_in[tier] = time.monotonic() + _PAUSE_S, unit.nbytes
        with self.lock:
            self.ledger.postpone(unit)

    def counted(self, name: str, move: Callable[[Disk], int]) -> int:
        """Move something, and count what was moved in a direction; return its bytes."""
        start = time.perf_counter()
        nbytes = move(self.disk)
        count = self.counters[name]
        with self.lock:
            count.nbytes += nbytes
            count.number += 1
            count.seconds += time.perf_counter() - start
        return nbytes
