"""Parse the simulated GPUs that ``gpus='sim:4x256MiB'`` asks for."""

from __future__ import annotations

import re
from typing import NamedTuple

from hpcgpu.errors import ConfigError
from hpcgpu.units import format_bytes, meant, parse_bytes

# In the words of both doors.
SIMULATE = "gpus='sim:4' in Python, --gpus sim:4 before the script of a command"
DEFAULT_BYTES = 256 << 20  # the demo's: small enough for a laptop's memory, and for a 1.6 GB array on four to spill
_SMALLEST_BARE = 1 << 20  # a number below without a unit is a slip
_TEXT = re.compile(r"sim:(\d{1,4})(?:x(.+))?")


class SimulatedGpus(NamedTuple):
    """The number of simulated GPUs on each node, and the memory of each."""

    per_node: int
    memory_bytes: int = DEFAULT_BYTES


def parse_simulated(text: str) -> SimulatedGpus:
    """Parse ``sim:4`` or ``sim:4x256MiB``; raise ConfigError for other text, no GPU, or no memory."""
    allowed = "allowed: 'sim:4', or 'sim:4x256MiB' (so many simulated GPUs on each node, each with so much memory)"
    found = _TEXT.fullmatch(text)
    if not found:
        raise ConfigError(f"{text!r} is no text for simulated GPUs; {allowed}")
    try:
        memory = parse_bytes(found[2]) if found[2] else DEFAULT_BYTES
    except ConfigError as error:
        raise ConfigError(f"{text!r}: {error}") from error
    if int(found[1]) < 1 or memory < 1:
        raise ConfigError(f"{text!r} is no GPU, or one without memory; {allowed}")
    if memory < _SMALLEST_BARE and found[2] and (words := meant(found[2])):
        raise ConfigError(f"{text!r} is GPUs of {format_bytes(memory)}{words}; {allowed}")
    return SimulatedGpus(int(found[1]), memory)
