"""Decisions about jobs: their requests, the next step, their words for people."""
