"""Partitioned topics: their metadata, how messages are assigned to partitions, and receiving from all of them."""
