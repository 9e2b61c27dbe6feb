"""Parse and format sizes, durations and counts; the one place that knows what ``5GB`` means."""

from __future__ import annotations

from hpcgpu.errors import ConfigError

_BYTES = {"": 1, "b": 1}
for _i, _letter in enumerate("kmgtp", start=1):
    _BYTES |= {_letter: 1000**_i, f"{_letter}b": 1000**_i, f"{_letter}i": 1024**_i, f"{_letter}ib": 1024**_i}
_SECONDS = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
JOULES_PER_KWH = 3.6e6
DURATIONS = "'HH:MM:SS', 'MM:SS', 'D-HH:MM:SS', or '90m', '2h', '1d'"
_NUMBER = r"(?i)\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*([a-z]*)\s*"
_CLOCK = r"(?:(\d+)-)?(\d+)(?::([0-5]?\d))?(?::([0-5]?\d))?"


def parse_bytes(value: object) -> int:
    """Parse a size into bytes: ``"5GB"`` is 5e9, ``"5GiB"`` is 5 * 2**30; raise ConfigError if invalid."""
    import re  # a third of what a rank of hpcgpu bind would import, and it parses no size

    match = re.fullmatch(_NUMBER, str(value)) if isinstance(value, (int, str)) and not isinstance(value, bool) else None
    if not match or match[2].lower() not in _BYTES:
        raise ConfigError(f"{value!r} is not a size; allowed: bytes as a number, or text such as '5GB', '512MiB'")
    size = int(float(match[1]) * _BYTES[match[2].lower()])
    if size < 0:
        raise ConfigError(f"{value!r} is negative; a size is 0 or more")
    return size


def meant(value: object) -> str:
    """Suggest the size that a bare number may stand for, as text to append; "" if there is no suggestion."""
    number = str(value).strip()
    if not number.isdecimal() or number[:1] == "0":
        return ""
    unit = "GiB" if int(number) < 1024 else "MiB"
    return f" (did you mean '{number}{unit}'?)"


def format_bytes(size: int) -> str:
    """Format a size: ``1.5 GiB``."""
    value, unit = float(size), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if abs(value) < 1024 or unit == "PiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def format_energy(joules: float) -> str:
    """Format energy with three digits at least: ``0.0123 kWh``."""
    kwh = joules / JOULES_PER_KWH
    return f"{kwh:,.0f} kWh" if kwh >= 100 else f"{kwh:.3g} kWh"


def counted(number: int, noun: str) -> str:
    """Format a count with its noun: ``1 core``, ``2 cores``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def parse_duration_s(value: float | str) -> int:
    """Parse ``"02:00:00"``, ``"1-12:00:00"``, ``"90m"``, ``"2h"`` or a number into seconds; or raise ConfigError."""
    import re

    text = str(value).strip().lower()
    match = re.fullmatch(_NUMBER, text)
    seconds = 0.0
    if match and (match[2] in _SECONDS or (not match[2] and not isinstance(value, str))):
        seconds = float(match[1]) * _SECONDS.get(match[2], 1)
    elif ":" in text and (clock := re.fullmatch(_CLOCK, text)):
        days, a, b, c = (int(x or 0) for x in clock.groups())
        # Slurm reads D-HH:MM as hours and minutes, MM:SS without days as minutes and seconds (sbatch(1), --time).
        has_hours = clock[4] is not None or clock[1] is not None
        seconds = days * 86400 + (a * 3600 + b * 60 + c if has_hours else a * 60 + b)
    if not 1 <= seconds < float("inf") or isinstance(value, bool):
        raise ConfigError(f"{value!r} is not a duration; allowed: {DURATIONS}")
    return int(seconds)


def format_duration(seconds: int) -> str:
    """Format seconds as ``HH:MM:SS``."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest:02}"
