"""Stand-ins for objects of values, which come up when they are touched."""
