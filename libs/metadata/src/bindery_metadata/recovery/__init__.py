"""Under-replication marks, locks, recovery records, last audits."""
