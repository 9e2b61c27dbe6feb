"""Manage the jobs of a run: submit, show, record, guard and end them."""
