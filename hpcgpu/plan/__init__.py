"""Floor 3, decisions: facts in, plans out. Pure."""
