"""Frames between distributed's and users' code."""
