"""Plans and measurements as text and tables for people."""
