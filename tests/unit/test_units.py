from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcgpu.errors import ConfigError
from hpcgpu.units import format_duration, parse_bytes, parse_duration_s


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5_000_000_000), ("512MiB", 512 << 20), (7, 7), ("1.5 kB", 1500), ("2G", 2_000_000_000)]
)
def test_bytes(text: int | str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["5 Gigs", "", "GB", "-1", -1, "1e", True, "1 2"])
def test_bytes_refused(text: int | str) -> None:
    with pytest.raises(ConfigError, match="size"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("02:00:00", 7200), ("1-12:00:00", 129600), ("2h", 7200), ("90m", 5400), ("30:00", 1800), ("1-12:30", 131400)],
)
def test_durations(text: str, seconds: int) -> None:
    assert parse_duration_s(text) == seconds


@pytest.mark.parametrize("text", ["2h30", "", "later", "0", "-1h", "1:2:3:4", "5x", "00:00:00"])
def test_durations_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not a duration"):
        parse_duration_s(text)


@given(st.integers(1, 10**7))
def test_duration_round_trip(seconds: int) -> None:
    assert parse_duration_s(format_duration(seconds)) == seconds
