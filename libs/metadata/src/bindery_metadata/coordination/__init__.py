"""Leader election and leases."""
