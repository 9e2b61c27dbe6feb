"""Plan from facts, purely."""
