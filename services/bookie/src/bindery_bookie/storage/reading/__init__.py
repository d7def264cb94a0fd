"""Reads: caches first, then index and entry log."""
