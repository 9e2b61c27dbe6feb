"""Proxies of objects in values, which come up when they are touched."""
