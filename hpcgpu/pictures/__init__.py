"""Pictures of a node's bindings."""
