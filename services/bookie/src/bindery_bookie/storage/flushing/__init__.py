"""Flushes: write cache to entry log and index, then LastLogMark."""
