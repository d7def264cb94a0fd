"""Garbage collection of entry logs, and compaction."""
