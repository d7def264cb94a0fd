"""Crashable and faulty stand-ins for disks and networks, for tests."""
