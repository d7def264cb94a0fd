"""Which broker serves which topic: bundles, leases, registration."""
