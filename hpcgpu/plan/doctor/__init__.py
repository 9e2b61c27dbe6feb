"""What may be wrong with a cluster's machines: facts in, findings out."""
