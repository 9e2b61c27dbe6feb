"""The energy of a run's GPUs and nodes, from the reports of all workers that share them."""

from __future__ import annotations

from collections.abc import Mapping


class EnergyCounter:
    """A counter in joules that never falls.

    Each worker reports what all use there, since its own start: what two have seen counts once.
    """

    def __init__(self) -> None:
        self.joules = self._busy_joules = 0.0
        self._workers: dict[str, tuple[float, float]] = {}  # this counter when a worker came, and its last busy_joules

    @property
    def busy_joules(self) -> float:
        """The part with a task running; several workers may be busy at once, as with their time."""
        return min(self._busy_joules, self.joules)

    def note(self, worker: str, joules: float, busy_joules: float = 0.0) -> None:
        """Take a worker's report, its first one after newer ones of the others, which have seen all of that."""
        begin, before = self._workers.get(worker, (self.joules - (joules if self._workers else 0.0), 0.0))
        self.joules = max(self.joules, begin + joules)
        self._busy_joules += busy_joules - before
        self._workers[worker] = begin, busy_joules

    def leave(self, worker: str) -> None:
        """Forget a worker; what it reported stays."""
        self._workers.pop(worker, None)


class EnergyUse:
    """The counters of GPUs, by node and PCI address, and of the nodes' CPUs."""

    def __init__(self) -> None:
        self.gpus: dict[tuple[str, str], EnergyCounter] = {}
        self.nodes: dict[str, EnergyCounter] = {}

    def note(self, worker: str, node: str, pci: str, facts: Mapping[str, float | None]) -> None:
        """Take the facts of a worker's heartbeat; it may know neither energy."""
        if (joules := facts.get("gpu_energy_j")) is not None:
            busy = facts.get("busy_gpu_energy_j") or 0.0
            self.gpus.setdefault((node, pci), EnergyCounter()).note(worker, joules, busy)
        if (joules := facts.get("cpu_energy_j")) is not None:
            self.nodes.setdefault(node, EnergyCounter()).note(worker, joules)

    def leave(self, worker: str, node: str, pci: str) -> None:
        """Forget a worker; what it reported stays."""
        for counter in filter(None, (self.gpus.get((node, pci)), self.nodes.get(node))):
            counter.leave(worker)
