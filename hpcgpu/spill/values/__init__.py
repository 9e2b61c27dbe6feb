"""What the store keeps: values of tasks, the units in them, and what each tier holds of a unit."""
