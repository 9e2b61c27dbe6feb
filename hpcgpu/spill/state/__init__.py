"""The decisions of the spill store, pure: events in, instructions out.

No class here has threads, I/O or a clock. Only ``machine`` is called from outside: by
:class:`hpcgpu.spill.store.executor.Executor` and its callers, each event under the store's lock.

``machine`` has the events and the laws, ``accounting`` the bytes and what goes down, ``unspills`` the ways up,
``allocations`` the threads whose allocations failed, ``prefetch`` what tasks will need, ``policy`` which units go,
``units`` the nouns.
"""
