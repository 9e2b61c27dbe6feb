"""Gives the processes of a test the batch system of processes; see local_system.ENVIRONMENT."""

from local_system import register

register()
