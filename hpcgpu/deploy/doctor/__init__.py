"""The doctor: its looks at a login node, and, by a short job, at nodes."""
