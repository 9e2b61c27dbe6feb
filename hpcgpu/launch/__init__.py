"""Launchers: the argv that starts the ranks, and a rank's facts from its environment. Pure: floor 2."""
