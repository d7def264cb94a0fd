"""The ledger client in memory, for tests."""
