"""Floor 5, the only place that imports distributed."""
