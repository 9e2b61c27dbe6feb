"""The view of a run's GPUs: the workers' reports, the summary at the end, the page, and metrics."""
