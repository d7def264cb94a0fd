"""Reading replicas from bookies in blocks, throttled per bookie."""
