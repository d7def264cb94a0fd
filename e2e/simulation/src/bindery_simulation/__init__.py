"""Simulated disks, networks and event loops with faults, and searches for failures that use them."""
