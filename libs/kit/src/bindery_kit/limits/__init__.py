"""Limits on what the clients of a port may hold in a process, or use in a time: bytes, connections, rates."""
