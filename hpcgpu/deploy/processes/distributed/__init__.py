"""What stands between distributed's frames and users' code."""
