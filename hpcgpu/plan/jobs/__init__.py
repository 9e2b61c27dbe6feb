"""Decide about jobs: one job, its end, its phase and its text for people."""
