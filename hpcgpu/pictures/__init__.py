"""Pictures of a node and its bindings, as SVG. Pure."""
