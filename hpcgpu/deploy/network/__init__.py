"""Connect a client to its scheduler: addresses, certificate, connection, tunnel, and signs of life."""
