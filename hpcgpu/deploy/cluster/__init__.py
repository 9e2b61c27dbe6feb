"""The cluster objects of user code: their classes, runs and connections to schedulers."""
