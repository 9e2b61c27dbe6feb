"""Site files: read, checked, compared with requests, and drafted."""
