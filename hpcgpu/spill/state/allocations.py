"""Allocations that have failed on a device: their threads wait until something has gone down."""

from __future__ import annotations

from hpcgpu.spill.state.accounting import Accounting
from hpcgpu.spill.state.units import Fail, FailedAllocation, Instruction, Resume


class FailedAllocations:
    """The failed allocations that are ``waiting``, in their order: freed bytes count for the first, then for the next.

    Pure: SpillState makes one and calls it, under the store's lock. An instruction resumes or fails each.
    """

    def __init__(self, accounting: Accounting) -> None:
        self._accounting = accounting
        self.waiting: list[FailedAllocation] = []

    def add(self, allocation: FailedAllocation) -> None:
        """Let an allocation wait."""
        last = max((a.until_bytes for a in self.waiting if a.tier == allocation.tier), default=0)
        allocation.had_bytes = self._accounting.freed.get(allocation.tier, 0)
        allocation.until_bytes = max(last, allocation.had_bytes) + allocation.nbytes
        self.waiting.append(allocation)

    def forget(self, allocation: FailedAllocation) -> None:
        """Let an allocation wait no more; those behind it may wait for its bytes, too."""
        if allocation in self.waiting:
            self.waiting.remove(allocation)
        self._start_anew()

    def serve(self, out: list[Instruction]) -> None:
        """Send down missing bytes that are not under way; resume an allocation with room, fail one without hope."""
        accounting = self._accounting
        for allocation in tuple(self.waiting):
            freed, leaving = accounting.freed.get(allocation.tier, 0), accounting.leaving.get(allocation.tier, 0)
            if (missing := allocation.until_bytes - freed - leaving) > 0:
                accounting.send_down(allocation.tier, missing, missing, allocation, out)
                freed, leaving = accounting.freed.get(allocation.tier, 0), accounting.leaving.get(allocation.tier, 0)
            if freed >= allocation.until_bytes or not leaving:
                self.waiting.remove(allocation)
                out.append(Resume(allocation) if freed > allocation.had_bytes else Fail(allocation, None))
        self._start_anew()

    def _start_anew(self) -> None:
        if not self.waiting:
            self._accounting.freed.clear()
