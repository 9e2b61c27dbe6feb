"""Floor 6, the rank program."""
