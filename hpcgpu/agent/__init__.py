"""The rank program: floor 6."""
