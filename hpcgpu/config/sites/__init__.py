"""Site files: read, checked, compared with what is asked for, and drafted."""
