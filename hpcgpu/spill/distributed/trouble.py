"""The metric in which a worker reports why it cannot spill."""

from __future__ import annotations

TROUBLE = "spill_trouble"
