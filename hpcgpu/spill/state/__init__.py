"""The decisions of the spill store, pure: events in, instructions out; no threads, no I/O, no clock.

Callers use ``machine`` only, which has the events and the laws. ``accounting`` counts bytes and decides which units go
down, by ``policy``; ``waits`` has units on their way up, prefetch and failed allocations; ``units`` has the nouns.
"""
