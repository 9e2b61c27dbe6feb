"""The jobs of a run: asked for, told of, written down, guarded and ended."""
