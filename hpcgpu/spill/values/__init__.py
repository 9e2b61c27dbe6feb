"""Values of tasks, the arrays in them, and the units of which the store moves each by itself."""
