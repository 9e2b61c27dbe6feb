"""The view of the GPUs of a run: the workers' reports, the summary at the end, the page, and metrics."""
