"""Ledger metadata in the store: ids, ledgers, closing records, verified records."""
