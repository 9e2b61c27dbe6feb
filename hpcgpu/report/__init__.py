"""Tables, pages for notebooks and metrics, as text, HTML and JSON."""
