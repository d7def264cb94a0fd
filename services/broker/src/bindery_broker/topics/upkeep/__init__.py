"""When topics are maintained and loaded: what is due, and in which order."""
