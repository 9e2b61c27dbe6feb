"""Floor 7, the command line: thin; it imports the commands only when one is run."""

from hpcgpu.cli.entry import join, main

__all__ = ["join", "main"]
