"""Stores for tests on a GPU."""

from spill_stores import new_store as new_store
