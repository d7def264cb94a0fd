"""`bindery ledger`, `bindery ledgers` and `bindery replicas`."""
