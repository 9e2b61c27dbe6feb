"""Decisions about one node: its workers, and the cores, memory, GPU and network ports of each."""
