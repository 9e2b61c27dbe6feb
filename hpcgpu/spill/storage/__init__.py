"""The disk tier, and the lock of the store."""
