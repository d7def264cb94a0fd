"""Write sets, quorum coverage, placement and replication planning."""
