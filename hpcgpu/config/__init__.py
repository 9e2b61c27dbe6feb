"""Floor 2, settings: layers with provenance, and the run document's text. Pure."""
