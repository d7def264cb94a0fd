"""Port 3181: connections, operations, admission and fairness of reads."""
