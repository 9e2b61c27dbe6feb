"""What is said of background work that met what nobody expected."""

from __future__ import annotations

import logging

import pytest


def said(log: pytest.LogCaptureFixture, level: int = logging.WARNING) -> list[logging.LogRecord]:
    """What has been said in this test."""
    return [r for r in log.records if r.levelno >= level and r.name != "asyncio"]


def failures(log: pytest.LogCaptureFixture) -> list[str]:
    """What has been said with a traceback."""
    return [r.getMessage() for r in said(log) if r.exc_info]
