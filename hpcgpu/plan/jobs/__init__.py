"""Decide about jobs: their requests, their next steps, their text for people."""
