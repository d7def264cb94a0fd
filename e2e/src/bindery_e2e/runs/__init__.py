"""Runs: traffic, faults and verdict put together."""
