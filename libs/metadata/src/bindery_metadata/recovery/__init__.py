"""Under-replication marks and locks, recovery records, and the results of the last audits."""
