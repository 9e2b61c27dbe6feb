"""The decisions of the spill store, pure: events in, instructions out; no threads, no I/O, no clock.

Callers use ``machine`` only, which has the events and the laws, units on their way up, the needs of tasks and failed
allocations. ``accounting`` counts bytes, and decides which units go down.
"""
