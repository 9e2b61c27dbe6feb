"""The mapping itself: it reads, writes, and carries out the state machine's instructions."""
