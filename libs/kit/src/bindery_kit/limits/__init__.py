"""Limits on what the clients of a port may hold in a process: bytes in all, and connections per address."""
