"""Decisions about jobs: what to request, what to do next, what people see of each."""
