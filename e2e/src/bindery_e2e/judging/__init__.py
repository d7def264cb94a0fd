"""Recorded histories and the verdict over them."""
