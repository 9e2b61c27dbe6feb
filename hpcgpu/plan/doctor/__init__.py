"""Find faults of a cluster's machines: facts in, findings out."""
