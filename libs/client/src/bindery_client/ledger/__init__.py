"""Ledger operations: write, read, recover, force, and reads of single replicas."""
