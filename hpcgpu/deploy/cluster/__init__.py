"""The cluster objects that people hold."""
