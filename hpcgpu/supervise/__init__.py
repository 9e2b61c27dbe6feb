"""Background work: what happens when it raises is stated where it is started, so that nothing ends silently.

``tasks`` starts coroutines, ``threads`` threads. Either goes on, after having said what went wrong and waited, or
tells its owner, who ends what depends on it.
"""
