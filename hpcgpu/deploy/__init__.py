"""Floor 5: distributed's scheduler, nannies, workers and clusters, and the jobs in which they run."""
