"""What is seen of the GPUs of a run: what workers report, the summary at the end, the page, and metrics."""
