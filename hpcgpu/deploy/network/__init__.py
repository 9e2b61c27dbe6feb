"""From the client to a scheduler: its addresses, certificate, tunnel, and the signs of life between the two."""
