"""Parse the simulated GPUs of ``simulate='4x256MiB'``, or of its short form ``gpus='sim:4x256MiB'``."""

from __future__ import annotations

import re
from typing import NamedTuple

from hpcgpu.errors import ConfigError
from hpcgpu.units import format_bytes, meant, parse_bytes

SIMULATE = "simulate=4 in Python, --simulate 4 before the script of a command"  # advice for users
DEFAULT_BYTES = 256 << 20  # the demo's: small enough for a laptop's memory, and for a 1.6 GB array on four to spill
_SMALLEST_BARE = 1 << 20  # a number below without a unit is a slip
_TEXT = re.compile(r"(sim:|)(\d{1,4})(?:x(.+))?")


class SimulatedGpus(NamedTuple):
    """The number of simulated GPUs on each node, and the memory of each."""

    per_node: int
    memory_bytes: int = DEFAULT_BYTES


def parse_simulated(text: str, prefix: str = "sim:") -> SimulatedGpus:
    """Parse ``4`` or ``4x256MiB`` after ``prefix``; raise ConfigError for other text, no GPU, or no memory."""
    allowed = f"allowed: '{prefix}4', or '{prefix}4x256MiB': 4 simulated GPUs on each node, of 256 MiB each"
    match = _TEXT.fullmatch(text)
    if not match or match[1] != prefix:
        raise ConfigError(f"{text!r} does not describe simulated GPUs; {allowed}")
    try:
        memory = parse_bytes(match[3]) if match[3] else DEFAULT_BYTES
    except ConfigError as error:
        raise ConfigError(f"{text!r}: {error}") from error
    if int(match[2]) < 1 or memory < 1:
        raise ConfigError(f"{text!r} has no GPU, or GPUs without memory; {allowed}")
    if memory < _SMALLEST_BARE and match[3] and (hint := meant(match[3])):
        raise ConfigError(f"{text!r} has GPUs of {format_bytes(memory)}{hint}; {allowed}")
    return SimulatedGpus(int(match[2]), memory)
