"""What the store keeps: a task's value, the units in it, and what each place holds of them."""
