"""Floor 4, the only place that runs programs, reads the machine or changes a process."""
