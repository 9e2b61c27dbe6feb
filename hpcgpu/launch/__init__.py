"""Launchers, and the variables that they and batch systems set for ranks."""
