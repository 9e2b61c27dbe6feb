"""The doctor: it gathers the facts of a login node and, by a short job, of nodes."""
