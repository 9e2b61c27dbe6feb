"""``python -m hpcgpu`` is the command ``hpcgpu``."""

from hpcgpu.cli import main

main()
