"""The doctor: what is looked at on a login node, and by a short job on its nodes."""
