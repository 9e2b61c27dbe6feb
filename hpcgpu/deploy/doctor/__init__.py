"""The doctor on a login node, and in the short job that it submits."""
