"""The decisions of the spill store, pure: events in, instructions out.

No class here has threads, I/O or a clock. ``machine`` alone is called from outside, by
:class:`hpcgpu.spill.store.executor.Executor` and its callers, and every event under the store's lock.

``machine`` has the events and the laws, ``tiers`` the accounting and what goes down, ``ups`` and ``rooms`` who waits,
``expected`` what tasks will need, ``policy`` which units go, ``units`` the nouns, ``invariants`` the laws as a check.
"""
