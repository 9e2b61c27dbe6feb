"""Floor 3, decisions: facts in, plans out. Pure.

Rooms, the lowest first: ``jobs`` (what is asked of the batch system), ``binding`` (what each worker of a node gets),
``doctor`` (the checks of a machine).
"""
