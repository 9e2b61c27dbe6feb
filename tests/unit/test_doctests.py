"""The examples in docstrings run; those that start a cluster run in ``tests/process/test_docs.py``."""

from __future__ import annotations

import doctest
import importlib

import pytest
from docstrings import CLUSTERS, modules


@pytest.mark.parametrize("name", sorted(modules() - CLUSTERS.keys()))
def test_examples_of_docstrings(name: str) -> None:
    failed, tried = doctest.testmod(importlib.import_module(name))
    assert tried
    assert not failed


def test_clusters_examples_are_known() -> None:
    """A module of this list has examples, so that none is left out by its old name."""
    assert CLUSTERS.keys() <= modules()
