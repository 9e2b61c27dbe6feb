"""All tests of the store run with a lock that tells when it is no leaf."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from lock_guard import guarded_lock


@pytest.fixture(autouse=True)
def _leaf_lock(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with guarded_lock(monkeypatch):
        yield
