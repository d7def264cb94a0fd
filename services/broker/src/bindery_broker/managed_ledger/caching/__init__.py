"""The broker's cache of entries: the tail of each topic, and what catch-up readers share."""
