"""Formats of metadata: ledger metadata, cookies, service info, replication records, availability."""
