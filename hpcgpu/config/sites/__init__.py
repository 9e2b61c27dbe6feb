"""Sites: which one this machine is, its file, its live facts, its rules for a request, and the draft of its file."""
