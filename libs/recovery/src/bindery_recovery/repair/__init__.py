"""The replication worker: take a mark, copy what is missing, update the ensemble."""
