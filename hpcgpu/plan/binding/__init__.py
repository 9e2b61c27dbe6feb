"""Decisions about one node: its workers, and the cores, memory and network ports of each, near its GPU."""
