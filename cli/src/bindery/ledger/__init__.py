"""`bindery ledger` and `bindery ledgers`."""
