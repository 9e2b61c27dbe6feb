"""The decisions of the spill store, pure: events in, instructions out. The store uses only ``policy`` of it yet.

``machine`` has the events and the laws, ``tiers`` the accounting and what goes down, ``ups`` and ``rooms`` who waits,
``expected`` what tasks will need, ``policy`` which units go, ``units`` the nouns, ``invariants`` the laws as a check.
"""
