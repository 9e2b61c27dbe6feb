"""Checkpoints: the chunks of collections in files, so that a script goes on after a restart."""
