"""Floor 2, readers that turn text about hardware into a :class:`hpcgpu.model.Topology`. Pure."""
