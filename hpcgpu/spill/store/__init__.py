"""The mapping itself: it reads, writes, and carries out what the state machine says."""
