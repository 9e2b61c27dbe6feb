"""Background work, whose starter states what happens after an exception, so that nothing ends silently.

``tasks`` starts coroutines, ``threads`` threads. After an exception the work logs it, waits and goes on, or tells its
owner, which ends everything that depends on it.
"""
