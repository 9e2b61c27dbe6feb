"""The content of the store: values of tasks, the units in them, and each tier's form of a unit."""
